"""A rank's experts: it reads its own and all that belongs to no expert, each once."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from moe_runtime.comm.collective import CollectiveDispatcher
from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.expert_weights import (
    initial_placement,
    layer_replicas,
    local_specs,
    make_moe,
    num_local_elements,
)
from moe_runtime.eplb.placement_file import write_placement
from moe_runtime.kernels.grouped_gemm import expert_mlp
from moe_runtime.layers.mlp import pack_expert
from moe_runtime.models.registry import load_model_config, tensor_specs
from tests.bits import assert_bits_equal
from tests.checkpoints import tiny_config, write_checkpoint
from tests.placements import any_placement, ordered_placement


@pytest.fixture
def config(tmp_path):
    return load_model_config(write_checkpoint(tmp_path, tiny_config("mixtral", num_local_experts=5)))


@pytest.mark.parametrize("ep_size", [1, 2, 3, 8])
def test_every_expert_tensor_is_local_to_one_rank_and_every_other_to_all(config, ep_size):
    placement = ordered_placement(2, 5, ep_size, [3, 0, 4, 2, 1])
    owners = Counter(spec.name for rank in range(ep_size) for spec in local_specs(config, placement, rank))
    for spec in tensor_specs(config):
        assert owners[spec.name] == (ep_size if spec.logical_expert_id is None else 1), spec.name


def test_each_layer_has_its_own_experts_and_copies_are_read_once_and_kept_twice(config):
    placement = any_placement(2, 5, 2, 4, seed=3)
    for rank in range(2):
        specs = local_specs(config, placement, rank)
        assert len({spec.name for spec in specs}) == len(specs)
        kept = {spec.name: num for spec, num in num_local_elements(config, placement, rank)}
        assert list(kept) == [spec.name for spec in specs]
        for layer_idx in range(2):
            copies = Counter(placement.layer(layer_idx).local_logical_experts(rank))
            for spec in tensor_specs(config):
                if spec.layer_idx == layer_idx and spec.logical_expert_id is not None:
                    wanted = copies[spec.logical_expert_id] * spec.shape[0] * spec.shape[1]
                    assert kept.get(spec.name, 0) == wanted


def test_physical_experts_stand_in_the_order_of_the_placement(config):
    placement = ordered_placement(2, 5, 2, [3, 0, 4, 2, 1])
    reads: list[tuple[str, int | None]] = []

    def read(role: str, expert: int | None) -> torch.Tensor:
        reads.append((role, expert))
        shape = {"router": (5, 64), "down_proj": (64, 40)}.get(role, (40, 64))
        seed = len(role) + 100 * (expert or 0)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    dispatcher = CollectiveDispatcher(RankGroup(rank=0, size=2), placement.first_expert, 3)
    moe = make_moe(config, placement, 1, 0, dispatcher, read)
    assert reads == [
        *((role, expert) for expert in (3, 0, 4) for role in ("gate_proj", "up_proj", "down_proj")),
        ("router", None),
    ]
    x = torch.randn(3, 64)
    for physical, logical in enumerate((3, 0, 4)):
        own = pack_expert(*(read(role, logical) for role in ("gate_proj", "up_proj", "down_proj")))
        assert_bits_equal(expert_mlp(x, moe.experts[physical]), expert_mlp(x, own))
    assert moe.replicas.table.tolist() == [[1], [4], [3], [0], [2]]
    assert moe.replicas.layer_idx == 1


def test_maps_have_room_for_every_placement_of_as_many_copies(config):
    placement = any_placement(2, 5, 2, 4, seed=3)
    for moe_idx in range(2):
        found = layer_replicas(placement, moe_idx)
        assert found.table.shape == (5, 5)
        physical = placement.physical_to_logical_map[moe_idx].tolist()
        for expert, count in enumerate(found.count.tolist()):
            copies = found.table[expert, :count].tolist()
            assert copies == [i for i, logical in enumerate(physical) if logical == expert]


def test_without_a_file_copies_follow_the_experts(config):
    plain = initial_placement(config, 2)
    assert plain.is_identity
    more = initial_placement(config, 2, 3)
    assert more.physical_to_logical_map.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]] * 2
    assert not more.is_identity
    with pytest.raises(ValueError, match=r"num_redundant_experts \(6\) must be at most 5"):
        initial_placement(config, 2, 6)
    with pytest.raises(ValueError, match=r"num_redundant_experts \(1\) must be at most 0"):
        initial_placement(config, 1, 1)


def test_a_file_must_fit_the_model_the_ranks_and_the_number_of_copies(config, tmp_path):
    file = tmp_path / "placement.json"
    placement = any_placement(2, 5, 2, 3, seed=1)
    write_placement(file, placement)
    assert initial_placement(config, 2, file=str(file)) == placement
    assert initial_placement(config, 2, 3, str(file)) == placement
    with pytest.raises(
        ValueError, match=r"num_redundant_experts \(2\) must be 0 or that of initial_placement \(3\)"
    ):
        initial_placement(config, 2, 2, str(file))
    with pytest.raises(
        ValueError, match=r"initial_placement \(.*placement.json\): ranks .* \(2\) must equal ep_size \(3\)"
    ):
        initial_placement(config, 3, file=str(file))
    write_placement(file, any_placement(2, 5, 2, 6, seed=1))
    with pytest.raises(ValueError, match=r"slots_per_rank \(6\) must be at most the model's 5 experts"):
        initial_placement(config, 2, file=str(file))
    with pytest.raises(ValueError, match=r"placement file .*none.json cannot be read"):
        initial_placement(config, 2, file=str(tmp_path / "none.json"))
