"""Loading: what is settled before, what a rank reads, what the fingerprint names, and the self-check's refusal."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.engine import model_loader
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.model_loader import LoadedModel, load_model, plan_model
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.errors import CheckpointError, InvarianceError
from moe_runtime.kernels.audit import AuditReport
from moe_runtime.kernels.schedules import Control, control
from moe_runtime.layers.mlp import MoE
from tests.checkpoints import tiny_config, write_checkpoint
from tests.placements import ordered_placement


def load(folder: Path, *, rank: int = 0, size: int = 1, on_progress=None, placement=None, **options):
    config = EngineConfig(model=str(folder), **options)
    group = RankGroup(rank=rank, size=size)
    plan = plan_model(config, group, placement=placement)
    return load_model(plan, config, group, on_progress=on_progress)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3_moe", mlp_only_layers=[0]))


def experts_of(model: LoadedModel) -> int:
    mlp = model.decoder.layers[1].mlp
    assert isinstance(mlp, MoE)
    return len(mlp.experts)


def test_the_context_is_the_model_s_unless_a_shorter_one_is_asked_for(folder):
    assert plan_model(EngineConfig(model=str(folder))).max_model_len == 512
    assert plan_model(EngineConfig(model=str(folder), max_model_len=100)).max_model_len == 100
    with pytest.raises(ValueError, match=r"max_model_len \(513\) must be at most .*\(512\)"):
        plan_model(EngineConfig(model=str(folder), max_model_len=513))


def test_the_dtype_is_the_checkpoint_s_unless_another_is_asked_for(folder):
    assert plan_model(EngineConfig(model=str(folder))).torch_dtype == torch.float32
    assert plan_model(EngineConfig(model=str(folder), dtype="bfloat16")).torch_dtype == torch.bfloat16


def test_the_audit_covers_the_chains_of_the_model(folder):
    model = load(folder)
    assert model.audit.failures == []
    # hidden 64 in 1, 2 and 8 parts; attention output 64 in 2; experts' 40 in 1; dense 96 in 2.
    assert set(model.audit.row_tiles) == {64, 32, 8, 40, 48}


@pytest.mark.parametrize("which", [Control.SPLIT_K_GEMM, Control.FREE_GEMM])
def test_a_machine_that_fails_the_self_check_is_refused(folder, which):
    with control(which), pytest.raises(InvarianceError, match=r"self-check failed .* GEMM K="):
        load(folder)


def test_any_failure_of_the_audit_refuses_the_model(folder, monkeypatch):
    monkeypatch.setattr(
        model_loader, "audit_shapes", lambda *args: AuditReport(failures=["softmax: differs"])
    )
    with pytest.raises(InvarianceError, match="softmax: differs"):
        load(folder)


def fingerprint(folder: Path, **options) -> str:
    return plan_model(EngineConfig(model=str(folder), **options)).fingerprint


def test_the_fingerprint_names_weights_and_dtype_and_nothing_else(folder, tmp_path):
    own = fingerprint(folder)
    assert fingerprint(folder, max_num_seqs=3, max_model_len=64, kv_cache_blocks=5) == own
    assert fingerprint(folder, dtype="bfloat16") != own
    config = tiny_config("qwen3_moe", mlp_only_layers=[0])
    assert fingerprint(write_checkpoint(tmp_path / "same", config)) == own
    assert fingerprint(write_checkpoint(tmp_path / "other", config, seed=1)) != own
    config["rms_norm_eps"] = 1e-5
    assert fingerprint(write_checkpoint(tmp_path / "eps", config)) != own


def test_the_fingerprint_names_the_group_where_its_size_may_change_bits(folder):
    def of(tp: int, invariance: str) -> str:
        config = EngineConfig(model=str(folder), tp=tp, invariance=invariance)
        return plan_model(config, RankGroup(rank=0, size=4)).fingerprint

    own = fingerprint(folder)
    assert {of(tp, "topology") for tp in (1, 2, 4)} == {own}
    assert len({own, of(1, "batch"), of(2, "batch"), of(4, "batch")}) == 4


@pytest.mark.parametrize(
    ("tp", "size", "message"),
    [
        (2, 1, r"world_size \(1\) must be divisible by tp \(2\)"),
        (2, 3, r"world_size \(3\) must be divisible by tp \(2\)"),
        (8, 8, r"num_attention_heads \(4\) must be divisible by tp \(8\)"),
    ],
)
def test_a_group_that_cannot_be_is_refused_before_weights_are_read(folder, tp, size, message):
    with pytest.raises(ValueError, match=message):
        plan_model(EngineConfig(model=str(folder), tp=tp), RankGroup(rank=0, size=size))


def test_a_vocabulary_with_fewer_ids_than_ranks_is_refused(tmp_path):
    config = tiny_config("mixtral", vocab_size=3)
    with pytest.raises(ValueError, match=r"vocab_size \(3\) must be at least tp \(4\)"):
        plan_model(
            EngineConfig(model=str(write_checkpoint(tmp_path, config)), tp=4), RankGroup(rank=0, size=4)
        )


@pytest.mark.parametrize(
    ("tp", "level", "expected"),
    [
        # hidden 64 in 1 and 8 parts and the experts' 40 as above; then the row-parallel chains.
        (2, "topology", {64, 8, 40, 32, 48}),
        (4, "topology", {64, 8, 40, 32, 48}),
        (4, "batch", {64, 8, 40, 16, 24}),
    ],
)
def test_the_audit_covers_the_chains_of_a_share(folder, tp, level, expected):
    config = plan_model(EngineConfig(model=str(folder))).config
    assert set(model_loader.audit_cpu(config, tp, level).row_tiles) == expected


def elements_of(model: LoadedModel) -> int:
    """Weight elements that a rank keeps for what its group shares, padding of tiles left out."""
    layers = model.decoder.layers
    dense = layers[0].mlp
    packed = [layer.attention.qkv for layer in layers] + [layer.attention.o_proj.weight for layer in layers]
    packed += [dense.gate_up, dense.down.weight, model.decoder.head.weight]
    return sum(weight.num_rows_in * weight.num_columns_out for weight in packed)


@pytest.mark.parametrize(("tp", "level"), [(2, "topology"), (4, "topology"), (4, "batch")])
def test_ranks_of_a_group_share_the_weights(folder, tp, level):
    config = EngineConfig(model=str(folder), tp=tp, invariance=level)
    group = RankGroup(rank=0, size=tp)
    plan = plan_model(config, group)
    whole = elements_of(load(folder))
    shares = [
        elements_of(
            load_model(
                plan,
                config,
                RankGroup(rank=rank, size=tp),
                tensor_parallel=TensorParallel(group=RankGroup(rank=rank, size=tp)),
            )
        )
        for rank in range(tp)
    ]
    held_twice = 2 * 2 * (max(1, 2 // tp) * tp - 2) * 16 * 64  # layers, k and v, heads, their rows
    assert sum(shares) == whole + held_twice


def test_the_fingerprint_names_the_experts_of_each_rank_only_where_they_pre_sum(folder):
    def planned(size: int, order: list[int] | None = None, **options):
        config = EngineConfig(model=str(folder), **options)
        placement = ordered_placement(2, 8, options.get("loopback_ranks", size), order)
        return plan_model(config, RankGroup(rank=0, size=size), placement=placement)

    own = fingerprint(folder)
    assert planned(4, invariance="topology").fingerprint == own
    assert planned(4, [7, 6, 5, 4, 3, 2, 1, 0]).fingerprint == own
    assert planned(1, invariance="batch").fingerprint == own
    assert not planned(1, invariance="batch").multiple_reduction.enabled
    four = planned(4, invariance="batch")
    assert four.multiple_reduction.enabled
    assert four.multiple_reduction.reason == "level batch with one fixed placement on 4 EP ranks"
    others = [own, planned(2, invariance="batch").fingerprint]
    others.append(planned(4, [0, 2, 1, 3, 4, 5, 6, 7], invariance="batch").fingerprint)
    others.append(planned(4, [2, 3, 0, 1, 4, 5, 6, 7], invariance="batch").fingerprint)
    assert len({four.fingerprint, *others}) == 5
    # The order of a rank's experts changes no bit, and virtual ranks are ranks.
    assert planned(4, [1, 0, 2, 3, 4, 5, 6, 7], invariance="batch").fingerprint == four.fingerprint
    virtual = planned(1, invariance="batch", dispatcher="loopback", loopback_ranks=4)
    assert virtual.fingerprint == four.fingerprint
    one = planned(1, invariance="batch", dispatcher="loopback", loopback_ranks=1)
    assert (one.fingerprint, one.multiple_reduction.enabled) == (own, False)


def test_redundant_experts_switch_pre_summing_off(folder):
    twice = ModelPlacement(
        physical_to_logical_map=np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1]] * 2),
        first_expert=(0, 5, 10),
        num_logical_experts=8,
    )
    config, group = EngineConfig(model=str(folder), invariance="batch"), RankGroup(rank=0, size=2)
    plan = plan_model(config, group, placement=twice)
    assert str(plan.multiple_reduction) == (
        "multiple_reduction off: 2 redundant experts: a copy's rank may differ by row"
    )
    assert plan.fingerprint == fingerprint(folder)


def test_a_placement_for_another_number_of_ranks_is_refused(folder):
    with pytest.raises(ValueError, match=r"placement is for 2 ranks; must be for ep_size \(1\)"):
        plan_model(EngineConfig(model=str(folder)), placement=ordered_placement(2, 8, 2))


def test_progress_ends_at_the_total_on_every_rank(folder):
    for rank, size in ((0, 1), (1, 3), (7, 8)):
        told: list[tuple[int, int]] = []
        load(
            folder,
            rank=rank,
            size=size,
            on_progress=lambda done, total, told=told: told.append((done, total)),
        )
        assert told[-1][0] == told[-1][1]
        assert len({total for _, total in told}) == 1
        assert [done for done, _ in told] == sorted({done for done, _ in told})


@pytest.mark.parametrize("size", [1, 3, 8])
def test_ranks_hold_all_experts_between_them(folder, size):
    assert sum(experts_of(load(folder, rank=rank, size=size)) for rank in range(size)) == 8


def test_a_rank_reads_only_its_own_experts(folder, monkeypatch):
    opened = []
    real = model_loader._open

    def watch(*args):
        opened.append(real(*args))
        return opened[-1]

    monkeypatch.setattr(model_loader, "_open", watch)
    placement = ordered_placement(2, 8, 4, [7, 2, 0, 1, 3, 4, 5, 6])
    load(folder, rank=0, size=4, placement=placement)
    names = [name for source in opened for name in source._names_read]
    read = {name.split("experts.")[1].split(".")[0] for name in names if "experts." in name}
    assert read == {"7", "2"}


def test_dummy_weights_need_no_checkpoint_and_follow_the_seed(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("mixtral")))
    with pytest.raises(CheckpointError):
        load(tmp_path)
    models = [load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2)]
    assert models[0].plan.fingerprint == models[1].plan.fingerprint != models[2].plan.fingerprint
    heads = [model.decoder.head.weight.tiles for model in models]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_dummy_experts_are_the_same_at_every_ep_size(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("mixtral")))
    whole = load(tmp_path, load_format="dummy").decoder.layers[1].mlp
    part = load(tmp_path, load_format="dummy", rank=2, size=3).decoder.layers[1].mlp
    assert isinstance(whole, MoE)
    assert isinstance(part, MoE)
    for own, expert in zip(part.experts, whole.experts[-2:], strict=True):
        assert torch.equal(own.gate_up.tiles, expert.gate_up.tiles)
        assert torch.equal(own.down.tiles, expert.down.tiles)


def test_bfloat16_weights_count_as_bfloat16(folder):
    tiles = load(folder, dtype="bfloat16").decoder.head.weight.tiles
    assert torch.equal(tiles, tiles.bfloat16().float())
    assert not torch.equal(tiles, load(folder).decoder.head.weight.tiles)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_without_its_files_is_refused(folder, tmp_path, missing):
    for name in {"config.json", "model.safetensors"} - {missing}:
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(CheckpointError):
        load(tmp_path)
