"""A dense decoder as a mixture of experts in Mixtral's layout: its MLP becomes slightly different experts.

Expert e of a layer is the MLP with every weight w replaced by round_bf16(w * (1 + noise * n)), n normal, drawn in fp32
from (tensor name, seed) alone; the router is normal. Routing weights of a token add to one and experts are nearly
equal, so the mixture says what the dense model says, while tokens spread over the experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ROUTER_STD", "to_bfloat16", "upcycled_layer"]

ROUTER_STD = np.float32(0.02)

_KEPT = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{letter}_proj" for letter in "qkvo"),
)
_EXPERT_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def upcycled_layer(
    read: Callable[[str], NDArray[np.float32]],
    layer_idx: int,
    *,
    num_experts: int,
    noise: float,
    seed: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one layer, in bfloat16, by their names in Mixtral's layout.

    Args:
        read: The dense model's tensors by their Hugging Face names.
        layer_idx: The layer.
        num_experts: Experts to make.
        noise: Relative standard deviation between an expert's weight and the dense one.
        seed: Of the noise and the router.
    """
    prefix = f"model.layers.{layer_idx}"
    for name in _KEPT:
        yield f"{prefix}.{name}.weight", to_bfloat16(read(f"{prefix}.{name}.weight"))
    block = f"{prefix}.block_sparse_moe"
    dense = {projection: read(f"{prefix}.mlp.{projection}.weight") for projection in _EXPERT_NAMES}
    hidden = dense["gate_proj"].shape[1]
    yield (
        f"{block}.gate.weight",
        to_bfloat16(_normal(f"{block}.gate", (num_experts, hidden), seed) * ROUTER_STD),
    )
    for expert_id in range(num_experts):
        for projection, weights in dense.items():
            name = f"{block}.experts.{expert_id}.{_EXPERT_NAMES[projection]}.weight"
            factor = np.float32(1) + np.float32(noise) * _normal(name, weights.shape, seed)
            yield name, to_bfloat16(weights * factor)


def to_bfloat16(values: NDArray[np.float32]) -> torch.Tensor:
    """Rounded to nearest even."""
    return torch.from_numpy(np.require(values, requirements=["C", "W"])).to(torch.bfloat16)


def _normal(name: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    # numpy, because torch draws normals with vector code whose bits differ between CPU generations.
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return generator.standard_normal(shape, dtype=np.float32)
