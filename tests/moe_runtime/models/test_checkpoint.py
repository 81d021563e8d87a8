"""Strict loading: every fault of the files is named before a tensor is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.models import checkpoint as checkpoint_module
from moe_runtime.models import shard as shard_module
from moe_runtime.models.checkpoint import Checkpoint
from moe_runtime.models.model_config import TensorSpec
from moe_runtime.models.registry import load_model_config, tensor_specs

every = pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen3_moe_sharded", "mixtral", "mixtral_sharded", "tied"]
)

MakeFolder = Callable[[str], Any]


def specs_of(model: Any) -> tuple[TensorSpec, ...]:
    return tensor_specs(load_model_config(model.path))


@every
def test_every_tensor_reads_bit_for_bit_in_its_own_dtype(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    expected = model.tensors()
    with model.open() as checkpoint:
        for spec in specs_of(model):
            tensor = checkpoint.read(spec)
            assert tensor.dtype == expected[spec.name].dtype
            assert torch.equal(tensor, expected[spec.name])


@every
def test_loading_reports_progress_in_bytes_and_covers_all_tensors(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    specs = specs_of(model)
    expected = model.tensors()
    loaded: dict[str, torch.Tensor] = {}
    progress: list[tuple[int, int]] = []
    checkpoint = model.open()
    checkpoint.load(
        specs,
        lambda spec, tensor: loaded.update({spec.name: tensor}),
        on_progress=lambda done, total: progress.append((done, total)),
    )
    checkpoint.close(expected=specs)
    total_bytes = sum(tensor.nbytes for tensor in expected.values())
    assert progress[0] == (0, total_bytes)
    assert progress[-1] == (total_bytes, total_bytes)
    assert progress == sorted(progress)
    assert len(progress) == len(specs) + 1
    assert loaded.keys() == expected.keys()
    assert (checkpoint.read_stats.num_tensors, checkpoint.read_stats.num_bytes) == (len(specs), total_bytes)


@pytest.mark.parametrize("name", ["qwen3_moe_sharded", "mixtral_sharded"])
def test_a_rank_reads_its_own_experts_bytes_only(
    folder: MakeFolder, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the file; all ranks together read each expert once."""
    model = folder(name)
    specs = specs_of(model)
    expert_specs = [spec for spec in specs if spec.logical_expert_id is not None]
    ranges: list[tuple[str, int, int]] = []
    read_tensor = shard_module.read_tensor

    def spy(file: Any, stored: Any) -> torch.Tensor:
        begin = stored.begin
        tensor = read_tensor(file, stored)
        ranges.append((stored.path.name, begin, file.tell()))
        return tensor

    monkeypatch.setattr(checkpoint_module, "read_tensor", spy)
    num_ranks = 3
    for rank in range(num_ranks):
        mine = [spec for spec in expert_specs if (spec.logical_expert_id or 0) % num_ranks == rank]
        checkpoint = model.open()
        before = len(ranges)
        checkpoint.load(mine, lambda spec, tensor: None)
        checkpoint.close(expected=mine)
        read_bytes = sum(end - begin for _, begin, end in ranges[before:])
        own_bytes = sum(model.tensors()[spec.name].nbytes for spec in mine)
        assert read_bytes == own_bytes == checkpoint.read_stats.num_bytes
    assert len(set(ranges)) == len(ranges) == len(expert_specs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_tensors_need_not_have_the_dtype_of_the_config(folder: MakeFolder, dtype: torch.dtype) -> None:
    model = folder("qwen3_moe")
    assert load_model_config(model.path).dtype == "bfloat16"
    model.edit_shard(
        model.shards[0],
        lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()}),
    )
    with model.open() as checkpoint:
        assert checkpoint.read(specs_of(model)[0]).dtype == dtype


def test_opening_reads_no_tensor(folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(checkpoint_module, "read_tensor", fail)
    monkeypatch.setattr(checkpoint_module, "read_bytes", fail)
    checkpoint = folder("qwen3_moe_sharded").open()
    assert checkpoint.read_stats == checkpoint_module.ReadStats()
    checkpoint.close()


def test_a_tied_model_may_store_an_equal_head_but_no_other(folder: MakeFolder) -> None:
    model = folder("tied")
    shard = model.shards[0]
    assert "lm_head.weight" not in model.tensors()
    model.open().close()
    embed = model.tensors()["model.embed_tokens.weight"].clone()

    model.edit_shard(shard, lambda tensors: tensors.update({"lm_head.weight": embed.clone()}))
    with model.open() as checkpoint:
        assert checkpoint.read_stats.num_bytes == 0
        assert all(spec.role != "lm_head" for spec in specs_of(model))

    for head in (embed + 0.5, embed.to(torch.bfloat16), embed[:-1].clone(), -embed):
        model.edit_shard(shard, lambda tensors, head=head: tensors.update({"lm_head.weight": head}))
        with pytest.raises(
            CheckpointError,
            match=r"lm_head\.weight in model\.safetensors differs from model\.embed_tokens\.weight",
        ):
            model.open()


def test_the_head_comparison_covers_every_chunk(folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_COMPARE_CHUNK_BYTES", 100)
    model = folder("tied")
    head = model.tensors()["model.embed_tokens.weight"].clone()
    model.edit_shard(model.shards[0], lambda tensors: tensors.update({"lm_head.weight": head.clone()}))
    model.open().close()
    head[-1, -1] += 1
    model.edit_shard(model.shards[0], lambda tensors: tensors.update({"lm_head.weight": head.clone()}))
    with pytest.raises(CheckpointError, match="must be absent or equal"):
        model.open()


def test_a_file_truncated_after_opening_raises_on_reading(folder: MakeFolder) -> None:
    model = folder("mixtral")
    checkpoint = model.open()
    model.shards[0].write_bytes(model.shards[0].read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="truncated after it was opened"):
        checkpoint.load(specs_of(model), lambda spec, tensor: None)
    checkpoint.close()


@pytest.mark.parametrize("whole_bytes", [1 << 30, 0])
def test_the_fingerprint_names_the_checkpoint_and_not_its_place(
    folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    """Whole files and samples alike: these tiny files lie wholly inside the samples."""
    monkeypatch.setattr(checkpoint_module, "_HASH_WHOLE_BYTES", whole_bytes)

    def digest(model: Any) -> str:
        with model.open() as checkpoint:
            return str(checkpoint.fingerprint())

    model = folder("mixtral_sharded")
    seen = [digest(model)]
    assert digest(model) == seen[0]
    moved = tmp_path / "moved"
    model.path.rename(moved)
    model.path = moved
    assert digest(model) == seen[0]

    model.edit_shard(model.shards[-1], lambda tensors: tensors["model.norm.weight"][3:4].add_(1))
    seen.append(digest(model))
    model.edit_json("config.json", lambda config: config.update(rope_theta=None))
    seen.append(digest(model))
    model.edit_json("generation_config.json", lambda config: config.update(eos_token_id=5))
    seen.append(digest(model))
    seen.append(digest(folder("mixtral")))
    assert len(set(seen)) == 5


def test_samples_of_a_large_file_reach_both_ends(folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "_HASH_WHOLE_BYTES", 0)
    monkeypatch.setattr(checkpoint_module, "_SAMPLE_BYTES", 16)
    model = folder("mixtral")
    with model.open() as checkpoint:
        before = checkpoint.fingerprint()
        data = bytearray(model.shards[0].read_bytes())
        data[-1] ^= 1
        model.shards[0].write_bytes(data)
        assert checkpoint.fingerprint() != before


def test_the_public_name_opens_a_folder_that_is_not_there_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: not a directory"):
        Checkpoint(tmp_path / "absent", ())
