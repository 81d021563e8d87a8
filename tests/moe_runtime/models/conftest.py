"""Tiny checkpoints written by transformers itself, and published config.json files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moe_runtime.models.checkpoint import Checkpoint
from moe_runtime.models.registry import load_model_config, tensor_specs

PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0",
        "use_cache": True,
        "vocab_size": 32000,
    },
}


class Folder:
    """A model folder that a test may damage.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Checkpoint:
        """Open it as a rank would."""
        return Checkpoint(self.path, tensor_specs(load_model_config(self.path)))

    @property
    def shards(self) -> list[Path]:
        """Its shards, in order."""
        return sorted(self.path.glob("*.safetensors"))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, as the reference library reads them."""
        return {name: tensor for shard in self.shards for name, tensor in self.read_shard(shard).items()}

    def read_shard(self, shard: Path) -> dict[str, torch.Tensor]:
        """The tensors of one shard."""
        with safe_open(shard, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def edit_shard(self, shard: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Rewrite one shard after ``edit`` has changed its tensors."""
        tensors = {name: tensor.clone() for name, tensor in self.read_shard(shard).items()}
        edit(tensors)
        save_file(tensors, shard)

    def edit_json(self, name: str, edit: Callable[[dict[str, Any]], None]) -> None:
        """Rewrite one JSON file after ``edit`` has changed it."""
        value = json.loads((self.path / name).read_text())
        edit(value)
        (self.path / name).write_text(json.dumps(value))


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Written once: each architecture in one file, and split over several with an index."""
    transformers = import_module("transformers")
    torch.manual_seed(0)
    shared: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
    }
    qwen = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **shared,
            num_hidden_layers=3,
            head_dim=8,
            moe_intermediate_size=12,
            num_experts=6,
            mlp_only_layers=[1],
            attention_bias=True,
        )
    ).to(torch.bfloat16)
    mixtral = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**shared, num_hidden_layers=2, num_local_experts=4)
    )
    tied = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **shared, num_hidden_layers=1, num_local_experts=2, tie_word_embeddings=True
        )
    )
    root = tmp_path_factory.mktemp("models")
    for name, model, max_shard_size in (
        ("qwen3_moe", qwen, "1GB"),
        ("qwen3_moe_sharded", qwen, "8KB"),
        ("mixtral", mixtral, "1GB"),
        ("mixtral_sharded", mixtral, "20KB"),
        ("tied", tied, "1GB"),
    ):
        model.save_pretrained(root / name, max_shard_size=max_shard_size)
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def folder(saved_models: dict[str, Path], tmp_path: Path) -> Callable[[str], Folder]:
    """``folder(name)``: a copy of a saved model, for this test alone."""

    def copy(name: str) -> Folder:
        return Folder(Path(shutil.copytree(saved_models[name], tmp_path / name)))

    return copy


@pytest.fixture
def published() -> Callable[..., dict[str, Any]]:
    """``published(model_type, **changes)``: the config.json of a published model, with some keys changed."""

    def config(model_type: str, /, **changes: Any) -> dict[str, Any]:
        return PUBLISHED[model_type] | changes

    return config
