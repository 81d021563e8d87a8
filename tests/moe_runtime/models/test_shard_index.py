"""Several safetensors files and their index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.models.shard_index import INDEX_NAME

every = pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_sharded", "mixtral", "mixtral_sharded"])
sharded = pytest.mark.parametrize("name", ["qwen3_moe_sharded", "mixtral_sharded"])

MakeFolder = Callable[[str], Any]


def refusal(model: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        model.open()
    return str(caught.value)


@every
def test_a_missing_and_an_unexpected_tensor_are_named(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    shard = model.shards[-1]
    model.edit_shard(shard, lambda tensors: tensors.update(stray=tensors.pop("model.norm.weight")))
    message = refusal(model)
    assert f"stray: {shard.name}" in message
    assert f"model.norm.weight: {shard.name}" in message or "model.norm.weight [16]: in no file" in message


@every
def test_a_wrong_shape_and_an_unsupported_dtype_are_named_together(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    shard = model.shards[-1]
    other = min(model.read_shard(shard))

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
        tensors[other] = tensors[other].double()

    model.edit_shard(shard, edit)
    message = refusal(model)
    assert f"model.norm.weight: [15] in {shard.name}, must be [16]" in message
    assert f"{other}: F64 in {shard.name}, must be one of F32, BF16, F16" in message


@every
@pytest.mark.parametrize("kept_bytes", [0, 5, 100, -1])
def test_a_truncated_shard_is_named_with_its_tensors(folder: MakeFolder, name: str, kept_bytes: int) -> None:
    model = folder(name)
    shard = model.shards[-1]
    first = min(model.read_shard(shard))
    shard.write_bytes(shard.read_bytes()[:kept_bytes])
    message = refusal(model)
    assert f"{shard.name}: truncated" in message
    if name.endswith("sharded"):
        assert f"{first}: {shard.name}" in message


@sharded
def test_a_missing_shard_is_named_with_its_tensors(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    shard = model.shards[-1]
    first = min(model.read_shard(shard))
    shard.unlink()
    message = refusal(model)
    assert f"{shard.name}: no such file" in message
    assert f"{first}: {shard.name}" in message


@every
def test_a_folder_named_like_a_shard_is_named(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    shard = model.shards[0]
    shard.unlink()
    shard.mkdir()
    assert f"{shard.name}: is a directory, must be a file" in refusal(model)


@sharded
def test_a_tensor_in_two_shards_is_named_with_both(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    first, last = model.shards[0], model.shards[-1]
    model.edit_shard(first, lambda tensors: tensors.update({"model.norm.weight": torch.ones(16)}))
    assert f"model.norm.weight: {first.name} and {last.name}" in refusal(model)


@sharded
def test_a_tensor_indexed_in_another_shard_is_named_with_both(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    first, last = model.shards[0], model.shards[-1]
    model.edit_json(INDEX_NAME, lambda index: index["weight_map"].update({"model.norm.weight": first.name}))
    assert f"model.norm.weight: index says {first.name}, found in {last.name}" in refusal(model)


@sharded
def test_a_tensor_that_the_index_does_not_name_is_named(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    model.edit_json(INDEX_NAME, lambda index: index["weight_map"].pop("model.norm.weight"))
    message = refusal(model)
    assert "tensors not in the index (1)" in message
    assert f"model.norm.weight: {model.shards[-1].name}" in message


@sharded
def test_a_tensor_that_only_the_index_names_is_named(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    shard = model.shards[0].name
    model.edit_json(INDEX_NAME, lambda index: index["weight_map"].update(ghost=shard))
    assert f"ghost: {shard}" in refusal(model)


@sharded
def test_problems_of_all_files_come_in_one_error(folder: MakeFolder, name: str) -> None:
    model = folder(name)
    first, second, last = model.shards[0], model.shards[1], model.shards[-1]
    first.write_bytes(b"")
    second.unlink()
    model.edit_shard(last, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    shutil.copy(last, model.path / "extra.safetensors")
    message = refusal(model)
    for expected in (
        f"{first.name}: truncated: 0 bytes",
        f"{second.name}: no such file",
        "model.norm.weight: [3] in",
        "files not named by the index (1):\n    extra.safetensors",
    ):
        assert expected in message


def test_a_long_list_is_cut_and_counted(folder: MakeFolder) -> None:
    model = folder("mixtral")
    model.edit_shard(
        model.shards[0], lambda tensors: tensors.update({f"z{i}": torch.ones(1) for i in range(25)})
    )
    message = refusal(model)
    assert "unexpected tensors (25):" in message
    assert "... and 15 more" in message
    assert message.count("model.safetensors") == 10


def test_an_untied_model_without_a_head_is_refused(folder: MakeFolder) -> None:
    model = folder("mixtral")
    model.edit_shard(model.shards[0], lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight [48, 16]: in no file" in refusal(model)


def test_a_checkpoint_that_fuses_its_experts_is_refused(folder: MakeFolder) -> None:
    model = folder("qwen3_moe")
    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.ones(6, 24, 16)}
    model.edit_shard(model.shards[0], lambda tensors: tensors.update(fused))
    assert "model.layers.0.mlp.experts.gate_up_proj: model.safetensors" in refusal(model)


def test_a_lone_file_of_any_name_needs_no_index(folder: MakeFolder) -> None:
    model = folder("mixtral")
    model.shards[0].rename(model.path / "weights.safetensors")
    model.open().close()


def test_several_files_without_an_index_are_refused(folder: MakeFolder) -> None:
    model = folder("mixtral_sharded")
    (model.path / INDEX_NAME).unlink()
    assert f"{INDEX_NAME} is missing" in refusal(model)
    lone = folder("mixtral")
    shutil.copy(lone.shards[0], lone.path / "copy.safetensors")
    assert "2 .safetensors files (copy.safetensors, model.safetensors) need an index" in refusal(lone)


def test_a_second_copy_in_the_vendors_own_layout_is_left_alone(folder: MakeFolder) -> None:
    model = folder("mixtral")
    (model.path / "consolidated.00.safetensors").write_bytes(b"not ours")
    model.open().close()


def test_a_folder_without_safetensors_is_refused(folder: MakeFolder) -> None:
    model = folder("mixtral")
    model.shards[0].unlink()
    assert "holds no .safetensors file" in refusal(model)
    (model.path / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin must be converted to safetensors" in refusal(model)


def test_inert_rotary_buffers_are_accepted(folder: MakeFolder) -> None:
    model = folder("mixtral")
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    model.edit_shard(model.shards[0], lambda tensors: tensors.update(buffer))
    model.open().close()


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "weight_map must be an object"),
        ('{"weight_map": {}}', "weight_map must be an object"),
        ('{"weight_map": {"a": 1}}', r"weight_map['a'] (1) must be the name of a file in the same folder"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "('../x.safetensors') must be the name of a file"),
        ('{"weight_map": {"a": "/x.safetensors"}}', "('/x.safetensors') must be the name of a file"),
    ],
)
def test_a_malformed_index_is_refused(folder: MakeFolder, index: str, expected: str) -> None:
    model = folder("mixtral_sharded")
    (model.path / INDEX_NAME).write_text(index)
    message = refusal(model)
    assert expected in message
    assert INDEX_NAME in message


@sharded
def test_links_into_a_cache_are_followed_and_broken_ones_are_missing_files(
    folder: MakeFolder, name: str, tmp_path: Path
) -> None:
    model = folder(name)
    blob = tmp_path / "blob"
    shard = model.shards[0]
    shard.rename(blob)
    shard.symlink_to(blob)
    model.open().close()
    blob.unlink()
    assert f"{shard.name}: no such file" in refusal(model)
    assert json.loads((model.path / INDEX_NAME).read_text())
