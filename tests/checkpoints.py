"""Tiny random checkpoints: written by ourselves in milliseconds, or by transformers together with its model.

Weights are scaled so that logits spread over several units and routing is decisive: a change of one bit early on has
something to change later.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from moe_runtime.models.model_config import TensorSpec
from moe_runtime.models.registry import load_model_config, tensor_specs

__all__ = ["WEIGHT_KINDS", "tiny_config", "write_checkpoint", "write_with_transformers"]

WEIGHT_KINDS = ("normal", "heavy_tailed", "cancelling")
"""Whose sums show their order; ``tied`` is one more kind, of ``normal`` weights."""

_SHARED: dict[str, Any] = {
    "bos_token_id": None,
    "dtype": "float32",
    "eos_token_id": None,
    "hidden_act": "silu",
    "hidden_size": 64,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "vocab_size": 128,
}
_OWN: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 16,
        "intermediate_size": 96,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": 40,
        "model_type": "mixtral",
        "num_experts_per_tok": 3,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
    },
}


def tiny_config(model_type: str, /, **changes: Any) -> dict[str, Any]:
    """A ``config.json`` of ``qwen3_moe`` or ``mixtral``, with some keys changed."""
    return _SHARED | _OWN[model_type] | changes


def write_checkpoint(
    folder: Path,
    config: dict[str, Any],
    *,
    kind: str = "normal",
    seed: int = 0,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
) -> Path:
    """Write a checkpoint in Hugging Face layout.

    Args:
        folder: Made if it is not there.
        config: From ``tiny_config``.
        kind: ``normal``; ``heavy_tailed``: each weight times a power of two over 12 binades; ``cancelling``: neighbours
            along the summed dimension carry large opposite values, and experts come in pairs that nearly cancel;
            ``tied``: ``normal`` with experts and tokens that tie exactly, as ``_tie`` makes them.
        seed: Of the weights.
        edit: Changes the tensors before they are written.

    Returns:
        ``folder``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model_config(folder)
    tensors = {
        spec.name: _draw(spec, kind, seed, i, model.tie_word_embeddings)
        for i, spec in enumerate(tensor_specs(model))
    }
    if kind == "tied":
        _tie(tensors)
    if edit is not None:
        edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _tie(tensors: dict[str, torch.Tensor]) -> None:
    """Give experts equal routers, the upper half those of the lower one and 3 that of 2, and tokens equal rows of the
    head, the upper half those of the lower one. Weights of experts and embeddings of tokens stay different.
    """
    for name, tensor in tensors.items():
        half = len(tensor) // 2
        if name.endswith("gate.weight"):
            tensor[3] = tensor[2]
            tensor[half : 2 * half] = tensor[:half].clone()
        elif name == "lm_head.weight":
            tensor[half : 2 * half] = tensor[:half].clone()


def write_with_transformers(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Any:
    """Make a model with transformers in fp32, let it write the checkpoint, and return it as the oracle.

    The eager implementations of experts and attention are used.
    """
    from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    classes = {
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        "mixtral": (MixtralConfig, MixtralForCausalLM),
    }
    fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    config_class, model_class = classes[config["model_type"]]
    parsed = config_class(**fields, attn_implementation="eager", experts_implementation="eager")
    model = model_class(parsed).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + values / 8)
            elif parameter.ndim == 1:
                parameter.copy_(values / 4)
            else:
                role = next((r for r in ("embed", "lm_head", "gate.weight") if r in name), "")
                gain = _gain(role.replace("gate.weight", "router"), bool(config["tie_word_embeddings"]))
                parameter.copy_(values * gain / (1.0 if role == "embed" else parameter.shape[-1] ** 0.5))
    model.save_pretrained(folder)
    return model


def _gain(role: str, tied: bool) -> float:
    """Standard deviation of an output for inputs of unit variance; of an embedding, of its elements."""
    return {"embed": 0.3 if tied else 1.0, "lm_head": 2.0, "router": 2.0}.get(role, 1.0)


def _draw(spec: TensorSpec, kind: str, seed: int, index: int, tied: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + index)
    values = torch.randn(spec.shape, generator=generator)
    if spec.role.endswith("norm"):
        return 1 + values / 8
    if len(spec.shape) == 1:
        return values / 4
    if kind == "heavy_tailed":
        values *= torch.exp2(torch.randint(-6, 6, spec.shape, generator=generator).float())
        values /= values.std()
    if kind == "cancelling" and spec.role not in ("embed", "lm_head", "router"):
        values[:, 0::2] += 4
        values[:, 1::2] -= 4
        if spec.logical_expert_id is not None:
            pair = torch.Generator().manual_seed(1000 * seed + 7 * (spec.logical_expert_id // 2))
            values = values / 16 + torch.randn(spec.shape, generator=pair)
            if spec.role == "down_proj":
                values *= 64 if spec.logical_expert_id % 2 else -64
    gain = _gain(spec.role, tied)
    return values * gain / (1.0 if spec.role == "embed" else spec.shape[1] ** 0.5)
