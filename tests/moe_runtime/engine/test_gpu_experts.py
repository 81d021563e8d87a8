"""Which experts a GPU rank gets, by its transport."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_runtime.comm.gpu_exchange import StepShape
from moe_runtime.comm.groups import RankGroup
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.ranks import RankContext

from moe_runtime.engine.gpu_experts import exchange_sizes, make_gpu_experts  # isort: skip
from moe_runtime.layers.cuda_experts import LocalExperts  # isort: skip
from moe_runtime.layers.spread_experts import LoopbackExperts, SpreadExperts  # isort: skip

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_blocks": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_gpu_checkpoint(tmp_path_factory.mktemp("experts"), num_hidden_layers=1)


def test_one_rank_holds_all_and_exchanges_nothing(folder):
    decoder = gpu_llm(folder, **LIMITS).model.decoder
    assert isinstance(decoder.experts, LocalExperts)
    assert decoder.experts.num_bytes == 0
    plan = SimpleNamespace(placement=SimpleNamespace(first_expert=(0, 4)))
    assert make_gpu_experts(plan, RankGroup(), "collective", None) is None  # type: ignore[arg-type]


def test_virtual_ranks_share_the_weights_and_have_regions_of_their_own(folder):
    decoder = gpu_llm(folder, dispatcher="loopback", loopback_ranks=3, **LIMITS).model.decoder
    experts = decoder.experts
    assert isinstance(experts, LoopbackExperts)
    assert experts.first_expert == (0, 2, 3, 4)
    assert decoder.layers[0].experts.w13.shape[0] == 4
    assert experts.num_bytes == sum(exchange.num_bytes for exchange in experts.exchanges) > 0


def load_share(context: RankContext, folder: str) -> tuple[int, int, int, bool]:
    decoder = gpu_llm(folder, group=context.group, dispatcher="collective", **LIMITS).model.decoder
    experts = decoder.experts
    assert isinstance(experts, SpreadExperts)
    rehearsal = experts.rehearsal(300)
    assert isinstance(rehearsal, SpreadExperts)
    assert rehearsal.routed_rows(StepShape.of_bucket(300, 3)).x.shape[0] == 300
    return (
        decoder.layers[0].experts.w13.shape[0],
        experts.expert_offset,
        experts.num_processes,
        rehearsal.exchange is not experts.exchange,
    )


def test_a_rank_loads_its_share_alone(ranks, folder):
    assert ranks(3, load_share, str(folder)) == [(2, 0, 3, True), (1, 2, 3, True), (1, 3, 3, True)]


def test_buffers_are_sized_from_the_configuration(folder):
    plan = gpu_llm(folder, **LIMITS).model.plan
    sizes = exchange_sizes(plan, 4, 300)
    assert sizes.table["x"] == ((1200, plan.config.hidden_size), torch.bfloat16)
    assert (sizes.num_topk, sizes.num_layers) == (2, 1)
