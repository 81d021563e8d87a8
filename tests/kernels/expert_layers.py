"""A small or a real expert layer with its routing, for the tests of the Triton expert kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.bits import hostile
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.topk_triton import topk  # isort: skip

__all__ = ["Layer", "Routing", "make_layer", "make_routing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Input rows ``[M, H]`` and weights ``[E, 2 I, H]``, ``[E, H, I]`` on ``DEVICE``."""

    h: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What ``topk`` writes, for M rows."""

    ids: torch.Tensor
    weights: torch.Tensor
    slot_table: torch.Tensor


def make_layer(
    num_rows: int,
    num_experts: int,
    hidden: int,
    width: int,
    *,
    kind: str = "normal",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Layer:
    """Hostile rows, normal weights; rows of another kind than ``normal`` are scaled down to stay finite."""
    h = hostile(kind, (num_rows, hidden), seed=seed + 1)
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        values = torch.empty(shape, dtype=dtype, device=DEVICE)
        return values.normal_(0.0, shape[-1] ** -0.5, generator=generator)

    h = h if kind == "normal" else h / h.abs().amax(1, keepdim=True).clamp(min=1.0) * 32.0
    return Layer(
        h=h.to(DEVICE, dtype),
        w13=matrix(num_experts, 2 * width, hidden),
        w2=matrix(num_experts, hidden, width),
    )


def make_routing(
    num_rows: int,
    num_experts: int,
    num_topk: int,
    *,
    num_tokens: int | None = None,
    capacity: int | None = None,
    seed: int = 0,
    with_table: bool = True,
) -> Routing:
    """Random routing; row t is the same for every ``num_rows`` of a seed."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randn(num_experts, generator=generator) for _ in range(num_rows)])
    ids = torch.empty(num_rows, num_topk, dtype=torch.int32, device=DEVICE)
    weights = torch.empty(num_rows, num_topk, device=DEVICE)
    table = torch.empty(num_experts, capacity or num_rows, dtype=torch.int32, device=DEVICE)
    live = torch.tensor([num_rows if num_tokens is None else num_tokens], dtype=torch.int32, device=DEVICE)
    topk(logits.to(DEVICE), live, num_topk, True, ids, weights, table if with_table else None)
    return Routing(ids=ids, weights=weights, slot_table=table)
