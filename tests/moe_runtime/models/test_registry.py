"""Architecture by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.models.registry import ARCHITECTURES, load_model_config, tensor_specs


def write(tmp_path: Path, raw: Any, generation: Any = None) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return tmp_path


def test_an_unknown_architecture_is_refused_by_name_with_the_supported_ones(
    tmp_path: Path, published: Callable[..., dict[str, Any]]
) -> None:
    with pytest.raises(CheckpointError, match="LlamaForCausalLM") as caught:
        load_model_config(write(tmp_path, published("mixtral", architectures=["LlamaForCausalLM"])))
    assert all(name in str(caught.value) for name in ARCHITECTURES)
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize("architectures", [None, [], "MixtralForCausalLM", [["MixtralForCausalLM"]], [1, 2]])
def test_a_malformed_architectures_list_is_refused(
    tmp_path: Path, published: Callable[..., dict[str, Any]], architectures: Any
) -> None:
    with pytest.raises(CheckpointError, match="must hold exactly one of"):
        load_model_config(write(tmp_path, published("mixtral", architectures=architectures)))


def test_a_folder_without_a_readable_config_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent: not a directory"):
        load_model_config(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, not list"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_end_of_sequence_ids_come_from_the_generation_config_first(
    tmp_path: Path, published: Callable[..., dict[str, Any]], model_type: str
) -> None:
    raw = published(model_type, eos_token_id=7, bos_token_id=None)
    assert load_model_config(write(tmp_path, raw)).eos_token_ids == (7,)
    assert load_model_config(write(tmp_path, raw, {"temperature": 0.6})).eos_token_ids == (7,)
    config = load_model_config(write(tmp_path, raw, {"eos_token_id": [9, 8], "bos_token_id": 3}))
    assert config.eos_token_ids == (9, 8)
    assert config.bos_token_id == 3
    none = published(model_type, eos_token_id=None)
    assert load_model_config(write(tmp_path, none, {"eos_token_id": None})).eos_token_ids == ()
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id \('</s>'\)"):
        load_model_config(write(tmp_path, raw, {"eos_token_id": "</s>"}))
    with pytest.raises(CheckpointError, match=r"eos_token_id \(\[1, 999999\]\) must be a token id"):
        load_model_config(write(tmp_path, raw, {"eos_token_id": [1, 999999]}))


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_sharded", "mixtral", "mixtral_sharded", "tied"])
def test_names_and_shapes_are_exactly_those_that_transformers_writes(
    folder: Callable[[str], Any], name: str
) -> None:
    model = folder(name)
    specs = tensor_specs(load_model_config(model.path))
    assert {spec.name: spec.shape for spec in specs} == {
        tensor_name: tuple(tensor.shape) for tensor_name, tensor in model.tensors().items()
    }


def test_reading_a_configuration_imports_no_torch() -> None:
    code = "import sys, moe_runtime.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
