"""A rank's experts: it reads its own and all that belongs to no expert, each once."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm.collective import CollectiveDispatcher
from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.expert_weights import is_local, make_moe
from moe_runtime.eplb.placement import contiguous_placement
from moe_runtime.kernels.grouped_gemm import expert_mlp
from moe_runtime.layers.mlp import pack_expert
from moe_runtime.models.registry import load_model_config, tensor_specs
from tests.bits import assert_bits_equal
from tests.checkpoints import tiny_config, write_checkpoint


@pytest.fixture
def config(tmp_path):
    return load_model_config(write_checkpoint(tmp_path, tiny_config("mixtral", num_local_experts=5)))


@pytest.mark.parametrize("ep_size", [1, 2, 3, 8])
def test_every_expert_tensor_is_local_to_one_rank_and_every_other_to_all(config, ep_size):
    placement = contiguous_placement(5, ep_size, [3, 0, 4, 2, 1])
    for spec in tensor_specs(config):
        owners = [rank for rank in range(ep_size) if is_local(spec, placement, rank)]
        assert len(owners) == (ep_size if spec.logical_expert_id is None else 1), spec.name


def test_physical_experts_stand_in_the_order_of_the_placement(config):
    placement = contiguous_placement(5, 2, [3, 0, 4, 2, 1])
    reads: list[tuple[str, int | None]] = []

    def read(role: str, expert: int | None) -> torch.Tensor:
        reads.append((role, expert))
        shape = {"router": (5, 64), "down_proj": (64, 40)}.get(role, (40, 64))
        seed = len(role) + 100 * (expert or 0)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    dispatcher = CollectiveDispatcher(RankGroup(rank=0, size=2), placement.first_expert, 3)
    moe = make_moe(config, placement, 0, dispatcher, read)
    assert reads == [
        *((role, expert) for expert in (3, 0, 4) for role in ("gate_proj", "up_proj", "down_proj")),
        ("router", None),
    ]
    x = torch.randn(3, 64)
    for physical, logical in enumerate((3, 0, 4)):
        own = pack_expert(*(read(role, logical) for role in ("gate_proj", "up_proj", "down_proj")))
        assert_bits_equal(expert_mlp(x, moe.experts[physical]), expert_mlp(x, own))
    assert moe.logical_to_physical.tolist() == [1, 4, 3, 0, 2]
