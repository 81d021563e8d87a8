"""Router logits on a GPU. Top-k is kernels/topk_triton.py.

Symbols: M rows, H hidden, E logical experts.

Numerics: each logit is eight fp32 chains over ascending features, one per part of ``ceil(H / 8)``, added as
``((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))`` in fp32, not rounded. The additions are written out, since the tree of
``tl.sum`` is the compiler's. Both forms below and every tile evaluate that tree: the same bits for a row, whatever the
other rows are. fp32 inputs take the canonical schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from moe_runtime.kernels.gemm_triton import chain_over_k, dense_gemm_reference
from moe_runtime.kernels.triton_launch import cdiv, launch_options, next_power_of_2, wait_for_previous

__all__ = [
    "CANONICAL_ROUTER",
    "ROUTER_SCHEDULES",
    "RouterSchedule",
    "default_router_schedule",
    "router_logits",
    "router_logits_reference",
]

PARTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSchedule:
    """How the logits are cut into programs.

    Attributes:
        sliced: All parts at once, by a batched dot (a part per warp); its first weights are loaded before the wait for
            the kernel before. Else part after part, experts as the tall operand of the tensor core: for many rows.
        tile_rows, tile_experts: Per program.
        tile_k: Features of a part per step.
        num_warps, num_stages: Of the compiler.
    """

    sliced: bool
    tile_rows: int
    tile_experts: int
    tile_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("tile_rows", "tile_experts", "tile_k"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} ({value}) must be a power of two of at least 16")


CANONICAL_ROUTER = RouterSchedule(
    sliced=True, tile_rows=16, tile_experts=16, tile_k=32, num_warps=8, num_stages=1
)
ROUTER_SCHEDULES = (
    CANONICAL_ROUTER,
    RouterSchedule(sliced=True, tile_rows=16, tile_experts=16, tile_k=256, num_warps=8, num_stages=1),
    RouterSchedule(sliced=True, tile_rows=16, tile_experts=16, tile_k=128, num_warps=8, num_stages=2),
    RouterSchedule(sliced=True, tile_rows=16, tile_experts=32, tile_k=128, num_warps=8, num_stages=2),
    RouterSchedule(sliced=False, tile_rows=32, tile_experts=64, tile_k=128, num_warps=4, num_stages=4),
    RouterSchedule(sliced=False, tile_rows=32, tile_experts=128, tile_k=64, num_warps=8, num_stages=4),
    RouterSchedule(sliced=False, tile_rows=64, tile_experts=128, tile_k=64, num_warps=8, num_stages=4),
)
"""Candidates for the audit; all give the same bits."""


def default_router_schedule(m: int, hidden: int) -> RouterSchedule:
    """The schedule for bf16: sliced for few rows, in one step where a part fits."""
    part = next_power_of_2(cdiv(hidden, PARTS))
    if m > 256:
        tile_k = min(64, max(16, part // 2))
        return RouterSchedule(
            sliced=False,
            tile_rows=32 if m <= 4096 else 64,
            tile_experts=128,
            tile_k=tile_k,
            num_warps=8,
            num_stages=4,
        )
    tile_k = min(256, max(16, part))
    return RouterSchedule(
        sliced=True, tile_rows=16, tile_experts=16, tile_k=tile_k, num_warps=8, num_stages=1
    )


def router_logits(
    h: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    *,
    schedule: RouterSchedule | None = None,
    pdl: bool = False,
) -> None:
    """``out = h @ w.T`` in eight parts.

    Args:
        h: ``[M, H]`` bfloat16 or float32, contiguous; M may be zero.
        w: ``[E, H]`` in h's dtype, contiguous; not written by earlier kernels of the step.
        out: ``[M, E]`` float32, contiguous.
        schedule: Default from ``default_router_schedule``; fp32 takes the canonical one only.
        pdl: Dependent launch.

    A row's bits depend neither on the other rows nor on the schedule. No host sync.
    """
    (m, hidden), num_experts = h.shape, w.shape[0]
    assert w.shape[1] == hidden, f"h {list(h.shape)}, w {list(w.shape)}"
    assert w.dtype == h.dtype, f"h is {h.dtype}, w {w.dtype}"
    assert out.shape == (m, num_experts), f"out {list(out.shape)}, h {list(h.shape)}, w {list(w.shape)}"
    assert out.dtype == torch.float32, f"out is {out.dtype}"
    assert all(t.is_contiguous() for t in (h, w, out)), "h, w and out must be contiguous"
    if m == 0:
        return
    if schedule is None:
        schedule = CANONICAL_ROUTER if h.dtype == torch.float32 else default_router_schedule(m, hidden)
    if h.dtype == torch.float32 and schedule != CANONICAL_ROUTER:
        raise ValueError(f"schedule ({schedule}) must be CANONICAL_ROUTER for float32 inputs")
    kernel = _router_sliced_kernel if schedule.sliced else _router_serial_kernel
    grid = (cdiv(num_experts, schedule.tile_experts), cdiv(m, schedule.tile_rows))
    kernel[grid](
        h,
        w,
        out,
        m,
        E=num_experts,
        H=hidden,
        PARTS=PARTS,
        TILE_M=schedule.tile_rows,
        TILE_E=schedule.tile_experts,
        TILE_K=schedule.tile_k,
        PDL=pdl,
        **launch_options(num_warps=schedule.num_warps, num_stages=schedule.num_stages, pdl=pdl),
    )


def router_logits_reference(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``[M, E]`` float32: the value, not the bits."""
    return dense_gemm_reference(h, w, torch.float32, PARTS)


def _router_cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata for Triton's profiler."""
    m, num_experts, hidden = args["M"], args["E"], args["H"]
    in_bytes = args["w"].element_size()
    return {
        "name": f"router_logits_{m}x{num_experts}x{hidden}",
        f"flops{8 * in_bytes}": 2 * m * num_experts * hidden,
        "bytes": in_bytes * hidden * (m + num_experts) + 4 * m * num_experts,
    }


@triton.jit
def _add_pairs(slices):  # type: ignore[no-untyped-def]
    """``[S, A, B]`` to ``[S / 2, A, B]``: slices 2i and 2i + 1 added."""
    pairs = tl.reshape(slices, (slices.shape[0] // 2, 2, slices.shape[1], slices.shape[2]))
    even, odd = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
    return even + odd


@triton.jit
def _load_slices(  # type: ignore[no-untyped-def]
    source, rows, num_rows, part, feature,
    H: tl.constexpr, PART: tl.constexpr, TILE_K: tl.constexpr, MASK_ROWS: tl.constexpr,
):  # fmt: skip
    """``[PARTS, rows, TILE_K]``; zeros past the rows, a part's end and H."""
    column = part * PART + feature
    pointers = source + rows.to(tl.int64) * H + column
    MASK_K: tl.constexpr = H % PART != 0 or PART % TILE_K != 0
    if MASK_ROWS and MASK_K:
        return tl.load(pointers, mask=(rows < num_rows) & (feature < PART) & (column < H), other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=rows < num_rows, other=0.0)
    elif MASK_K:
        return tl.load(pointers, mask=(feature < PART) & (column < H), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit(do_not_specialize=["M"], launch_metadata=_router_cost)
def _router_sliced_kernel(  # type: ignore[no-untyped-def]
    h, w, out, M,
    E: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_E: tl.constexpr, TILE_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = (H + PARTS - 1) // PARTS
    part = tl.arange(0, PARTS)[:, None, None]
    feature = tl.arange(0, TILE_K)[None, None, :]
    rows = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    experts = tl.program_id(0) * TILE_E + tl.arange(0, TILE_E)
    rows_3d = rows[None, :, None]
    experts_3d = experts[None, :, None]
    b = _load_slices(w, experts_3d, E, part, feature, H, PART, TILE_K, E % TILE_E != 0)
    wait_for_previous(PDL)
    a = _load_slices(h, rows_3d, M, part, feature, H, PART, TILE_K, True)
    slices = tl.dot(a, tl.permute(b, (0, 2, 1)), input_precision="ieee")
    for k in range(TILE_K, PART, TILE_K):
        b = _load_slices(w, experts_3d, E, part, k + feature, H, PART, TILE_K, E % TILE_E != 0)
        a = _load_slices(h, rows_3d, M, part, k + feature, H, PART, TILE_K, True)
        slices = tl.dot(a, tl.permute(b, (0, 2, 1)), slices, input_precision="ieee")
    logits = tl.reshape(_add_pairs(_add_pairs(_add_pairs(slices))), (TILE_M, TILE_E))
    pointers = out + rows.to(tl.int64)[:, None] * E + experts[None, :]
    tl.store(pointers, logits, mask=(rows[:, None] < M) & (experts[None, :] < E))


@triton.jit
def _pair(  # type: ignore[no-untyped-def]
    h, w, zero, M, first_row, first_expert, first_part,
    E: tl.constexpr, H: tl.constexpr, PART: tl.constexpr,
    TILE_M: tl.constexpr, TILE_E: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Chains of two neighbouring parts, added."""
    even = chain_over_k(
        h, w, zero, M, first_row, first_expert, first_part * PART, E, H, PART, 0,
        TILE_M, TILE_E, TILE_K, True, False,
    )  # fmt: skip
    odd = chain_over_k(
        h, w, zero, M, first_row, first_expert, (first_part + 1) * PART, E, H, PART, 0,
        TILE_M, TILE_E, TILE_K, True, False,
    )  # fmt: skip
    return even + odd


@triton.jit(do_not_specialize=["M"], launch_metadata=_router_cost)
def _router_serial_kernel(  # type: ignore[no-untyped-def]
    h, w, out, M,
    E: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_E: tl.constexpr, TILE_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = (H + PARTS - 1) // PARTS
    wait_for_previous(PDL)
    m0 = tl.program_id(1) * TILE_M
    e0 = tl.program_id(0) * TILE_E
    # A zero that the compiler cannot see: it would fold "x + dot(a, b, 0)" into one longer chain.
    zero = tl.zeros((TILE_E, TILE_M), tl.float32) + tl.where(M < 0, 1.0, 0.0)
    logits = _pair(h, w, zero, M, m0, e0, 0, E, H, PART, TILE_M, TILE_E, TILE_K)
    logits += _pair(h, w, zero, M, m0, e0, 2, E, H, PART, TILE_M, TILE_E, TILE_K)
    upper = _pair(h, w, zero, M, m0, e0, 4, E, H, PART, TILE_M, TILE_E, TILE_K)
    upper += _pair(h, w, zero, M, m0, e0, 6, E, H, PART, TILE_M, TILE_E, TILE_K)
    logits += upper
    rows = m0 + tl.arange(0, TILE_M)
    experts = e0 + tl.arange(0, TILE_E)
    pointers = out + rows.to(tl.int64)[None, :] * E + experts[:, None]
    tl.store(pointers, logits, mask=(rows[None, :] < M) & (experts[:, None] < E))
