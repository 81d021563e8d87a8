"""Bytes a rank needs."""

from __future__ import annotations

import pytest

from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.kv_cache import kv_block_bytes
from moe_runtime.engine.model_loader import plan_model
from moe_runtime.eplb.placement import contiguous_model_placement
from moe_runtime.errors import CapacityError
from moe_runtime.planner.memory import RankMemory, check_fit, draft_memory, rank_memory


def test_the_built_in_model_is_counted_to_the_last_element() -> None:
    plan = plan_model(EngineConfig())
    block_bytes = kv_block_bytes(plan.config, plan.torch_dtype)
    assert block_bytes == 2 * 4 * 2 * 64 * 64 * 2
    one = rank_memory(plan.config, contiguous_model_placement(4, 16, 1), 0, 10, block_bytes)
    assert one == RankMemory(weight_bytes=6_834_944 * 4, kv_bytes=10 * block_bytes)


def test_experts_are_spread_and_the_rest_is_on_every_rank() -> None:
    config = plan_model(EngineConfig()).config
    one = rank_memory(config, contiguous_model_placement(4, 16, 1), 0, 0, 0).weight_bytes
    placement = contiguous_model_placement(4, 16, 3)
    three = [rank_memory(config, placement, rank, 0, 0).weight_bytes for rank in range(3)]
    experts = 16 * 4 * 3 * 256 * 112 * 4
    assert sum(three) == one + 2 * (one - experts)
    assert three[0] > three[2]


def test_copies_are_counted_where_they_are() -> None:
    config = plan_model(EngineConfig()).config
    whole, more = (contiguous_model_placement(4, 16, 2, num_redundant) for num_redundant in (0, 6))
    expert = 4 * 3 * 256 * 112 * 4  # in all layers
    for rank in range(2):
        found = [rank_memory(config, placement, rank, 0, 0).weight_bytes for placement in (whole, more)]
        assert found[1] - found[0] == 3 * expert


@pytest.mark.parametrize("tp", [2, 4])
def test_a_group_shares_all_but_experts_norms_and_routers(tp: int) -> None:
    config = plan_model(EngineConfig()).config
    placement = contiguous_model_placement(4, 16, 4)
    alone = rank_memory(config, placement, 0, 0, 0).weight_bytes
    share = rank_memory(config, placement, 0, 0, 0, tp).weight_bytes
    # Four layers: q and o over 4 heads of 64, k and v over 2 heads; the tied embedding.
    kv_heads = max(1, 2 // tp)
    whole = 4 * (2 * 4 * 64 + 2 * 2 * 64) * 256 + 2048 * 256
    kept = 4 * (2 * 4 * 64 // tp + 2 * kv_heads * 64) * 256 + 2048 // tp * 256
    assert alone - share == (whole - kept) * 4


def test_what_does_not_fit_is_refused_with_both_figures() -> None:
    ranks = [RankMemory(weight_bytes=2**30, kv_bytes=2**30)] * 2
    assert check_fit(ranks, 4 * 2**30) == 4 * 2**30
    with pytest.raises(
        CapacityError, match=r"need 4\.0 GiB and 3\.9 GiB are available; lower kv_cache_blocks"
    ):
        check_fit(ranks, int(3.9 * 2**30))


def test_the_room_for_moves_is_that_of_one_layer() -> None:
    config = plan_model(EngineConfig()).config
    placement = contiguous_model_placement(4, 16, 2, 3)
    for rank, num_slots in enumerate((10, 9)):
        still, moving = (
            rank_memory(config, placement, rank, 0, 0, moves_experts=moves) for moves in (False, True)
        )
        assert still.spare_bytes == 0
        assert moving.spare_bytes == moving.total_bytes - still.total_bytes == num_slots * 3 * 256 * 112 * 4


def test_a_draft_model_is_counted_whole_with_as_many_blocks() -> None:
    plan = plan_model(EngineConfig())
    found = draft_memory(plan, 10)
    assert found == RankMemory(
        weight_bytes=6_834_944 * 4, kv_bytes=10 * kv_block_bytes(plan.config, plan.torch_dtype)
    )
