"""Expert load on a GPU: how often each logical expert occurs in the routing of a step.

Symbols: L layers with experts, M rows, E logical experts, K slots. Numerics: integers alone, whose order cannot matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.triton_launch import (
    cdiv,
    launch_options,
    next_power_of_2,
    tensors_cost,
    wait_for_previous,
)

__all__ = ["count_experts", "count_experts_reference"]

BLOCK = 512  # pairs per program


def count_experts(routing: torch.Tensor, counts: torch.Tensor, *, pdl: bool = False) -> None:
    """Add the ids of all rows to ``counts``; no host sync.

    Example: two experts, routing ``[[[1, 0], [1, -1]]]`` adds ``[[1, 2]]``.

    Args:
        routing: ``[L, M, K]`` int16; a layer's rows are contiguous. -1 counts nothing.
        counts: ``[L, E]`` int64, updated.
        pdl: Dependent launch.
    """
    num_layers, num_rows, num_topk = routing.shape
    num_pairs, num_experts = num_rows * num_topk, counts.shape[1]
    assert routing.stride()[1:] == (num_topk, 1) or num_pairs == 0, f"rows of stride {routing.stride()}"
    if num_pairs == 0 or num_layers == 0:
        return
    _count_experts[(num_layers, cdiv(num_pairs, BLOCK))](
        routing, counts, num_pairs, routing.stride(0), E=num_experts,
        EP=max(16, next_power_of_2(num_experts)), BLOCK=BLOCK, PDL=pdl,
        **launch_options(num_warps=4, num_stages=1, pdl=pdl),
    )  # fmt: skip


def count_experts_reference(routing: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """``counts`` afterwards, by torch."""
    num_experts = counts.shape[1]
    added = [torch.bincount(ids[ids >= 0].long().flatten(), minlength=num_experts) for ids in routing]
    return counts + torch.stack(added)


@triton.jit(do_not_specialize=["num_pairs"], launch_metadata=tensors_cost("routing", updated="counts"))
def _count_experts(  # type: ignore[no-untyped-def]
    routing, counts, num_pairs, layer_stride,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program per layer and BLOCK pairs."""
    wait_for_previous(PDL)
    layer = tl.program_id(0)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(routing + layer * layer_stride + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
    count = tl.histogram(tl.maximum(ids, 0), EP, mask=ids >= 0)
    e = tl.arange(0, EP)
    tl.atomic_add(counts + layer * E + e, count.to(tl.int64), mask=(e < E) & (count > 0), sem="relaxed")
