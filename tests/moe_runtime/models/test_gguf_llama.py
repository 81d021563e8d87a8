"""GGUF files as Hugging Face's layout has them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.models.gguf_llama import GgufLlama, rotation_halves
from tests.gguf_files import TEMPLATE, dense_tensors, write_gguf


def test_rows_of_a_head_go_from_pairs_to_halves() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]
    assert rotation_halves(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_every_tensor_is_the_one_that_was_converted(tmp_path: Path) -> None:
    tensors = dense_tensors()
    model = GgufLlama(write_gguf(tmp_path / "model.gguf", tensors))
    for name, values in tensors.items():
        found = model.read(name)
        assert found.shape == values.shape
        if "layers" not in name or values.ndim == 1:
            assert np.array_equal(found, values), name
        else:  # in eight bits: half a step of the largest value in its block of 32
            step = np.abs(values.reshape(-1, 32)).max(axis=1) / 127
            error = np.abs(found - values).reshape(-1, 32).max(axis=1)
            assert (error <= 0.502 * step + 1e-3).all(), name
    with pytest.raises(CheckpointError, match=r"no tensor for model.layers.2.mlp.up_proj.weight"):
        model.read("model.layers.2.mlp.up_proj.weight")


def test_the_configuration_has_the_numbers_that_were_written(tmp_path: Path) -> None:
    model = GgufLlama(write_gguf(tmp_path / "model.gguf", dense_tensors()))
    config = model.config()
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 10000.0)
    assert (config["num_attention_heads"], config["num_key_value_heads"], model.num_layers) == (4, 2, 2)
    assert (config["bos_token_id"], config["eos_token_id"], config["vocab_size"]) == (1, 2, 263)
    assert config["tie_word_embeddings"]
    assert model.chat_template == TEMPLATE


def test_the_tokenizer_merges_splits_digits_and_knows_control_tokens(tmp_path: Path) -> None:
    model = GgufLlama(write_gguf(tmp_path / "model.gguf", dense_tensors()))
    tokenizer = model.tokenizer()
    assert tokenizer.encode("a the<|im_end|>12").tokens == ["a", "\u0120the", "<|im_end|>", "1", "2"]
    text = "caf\u00e9 \u4f60\u597d 12"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert model.special_tokens() == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "unk_token": "<|endoftext|>",
    }  # fmt: skip


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf", dense_tensors(), architecture="qwen2")
    with pytest.raises(CheckpointError, match=r"general.architecture \(qwen2\) must be llama"):
        GgufLlama(other)
    text = tmp_path / "text.gguf"
    text.write_text("no GGUF" * 20)
    with pytest.raises(CheckpointError, match=r"text\.gguf cannot be read as GGUF"):
        GgufLlama(text)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs the package gguf: pip install 'moe-runtime\[demo\]'"):
        GgufLlama(tmp_path / "model.gguf")
