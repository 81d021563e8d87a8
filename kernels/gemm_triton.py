"""Dense GEMM on a GPU: own kernels with free schedules, and the vendor's library where an audit allows it.

Symbols: M rows, K input features, N output features, P parts of K. Weights are ``[N, K]`` as checkpoints hold them.

Numerics: each output element is P fp32 chains over ascending K, one per part of ``ceil(K / P)`` features, added by the
tree of kernels/trees.py in fp32, then rounded once to the output dtype; a bias is added to the rounded value and the
sum rounded. bf16 products go through the tensor core, fp32
ones through ``ieee`` dots on the canonical schedule. Tails of M, N and K load zeros, which change no chain. Tile sizes,
warps, stages, operand order, TMA, early weights and dependent launch are free: they give the same bits for a row
whatever the other rows are (measured on an H200; to be audited elsewhere).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_runtime.kernels.trees import tree_sum
from moe_runtime.kernels.triton_launch import cdiv, launch_options, wait_for_previous

__all__ = [
    "CANONICAL_GEMM",
    "MAX_SUMMED_PARTS",
    "GemmSchedule",
    "candidate_gemm_schedules",
    "chain_over_k",
    "default_gemm_schedule",
    "dense_gemm",
    "dense_gemm_parts",
    "dense_gemm_parts_reference",
    "dense_gemm_reference",
    "vendor_gemm",
]

MAX_SUMMED_PARTS = 3
"""Up to three parts, a running total in ascending order is the binary tree."""
ROW_TILES_PER_GROUP = 8  # neighbouring programs share rows and columns in L2


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSchedule:
    """How one GEMM is cut into programs; never which tree it evaluates.

    Attributes:
        tile_rows: Rows of x (tokens) per program.
        tile_columns: Output features per program.
        tile_k: Features per step of the chain.
        num_warps, num_stages: Of the compiler.
        swap: The weights are the tall operand of the tensor core, tokens the short one (for few rows).
        early_k: Features of the weight tile loaded before the wait for the kernel before; 0 or a power of two.
        tma: Weights, and x unless swapped, arrive through tensor descriptors.
    """

    tile_rows: int
    tile_columns: int
    tile_k: int
    num_warps: int
    num_stages: int
    swap: bool
    early_k: int = 0
    tma: bool = False

    def __post_init__(self) -> None:
        for name in ("tile_rows", "tile_columns", "tile_k"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} ({value}) must be a power of two of at least 16")
        if self.early_k and (self.early_k < 16 or self.early_k & (self.early_k - 1)):
            raise ValueError(f"early_k ({self.early_k}) must be 0 or a power of two of at least 16")
        if self.early_k and self.tma:
            raise ValueError(f"early_k ({self.early_k}) must be 0 with tma: it loads by pointer")


CANONICAL_GEMM = GemmSchedule(tile_rows=16, tile_columns=64, tile_k=32, num_warps=4, num_stages=2, swap=False)
"""The schedule that all others are compared with, and the only one for fp32 inputs."""


def default_gemm_schedule(m: int, n: int, k: int, parts: int = 1) -> GemmSchedule:
    """The schedule measured best on an H200 for bf16, made to fit other shapes.

    Args:
        m: Rows; only speed depends on it.
        n, k: Of the weight.
        parts: P.
    """
    k_part = -(-k // parts)
    widest_k = max(16, 1 << (k_part.bit_length() - 1))
    tile_rows = min(128, max(16, 1 << (m - 1).bit_length()))
    if m <= 128:
        large = n >= 32768
        # Row-parallel layers follow attention, under which their first weights can arrive.
        early_k = min(512 if m == 1 else 256, widest_k) if parts > 1 and m <= 32 else 0
        tall = large and m > 64  # 128 weight rows by 128 tokens
        schedule = GemmSchedule(
            tile_rows=tile_rows // 2 if parts > 1 and m > 32 else tile_rows,
            tile_columns=128 if tall else 64, tile_k=min(64 if tall else 128, widest_k), num_warps=8 if tall else 4,
            num_stages=3 if large and 32 < m <= 64 else 5 if tile_rows <= 32 and not large and parts == 1 else 4,
            swap=True, early_k=early_k, tma=large and not early_k,
        )  # fmt: skip
    elif m <= 192 or (m <= 256 and parts > 1):
        low = m <= 192
        schedule = GemmSchedule(
            tile_rows=64 if low else 128, tile_columns=128 if low else 64, tile_k=min(64, widest_k), num_warps=4,
            num_stages=5 if low else 6, swap=False, tma=True,
        )  # fmt: skip
    else:
        wide = m >= 2048 and n >= 4096 and parts == 1
        few = 256 < m < 1024 and parts == 1
        schedule = GemmSchedule(
            tile_rows=128, tile_columns=256 if wide else 128, tile_k=min(64, widest_k),
            num_warps=4 if 1024 <= m < 2048 and parts == 1 else 8,
            num_stages=3 if wide or few else 5 if m <= 256 else 4, swap=False, tma=True,
        )  # fmt: skip
    return schedule if not schedule.tma or _fits_tma(schedule, k, parts) else replace(schedule, tma=False)


def candidate_gemm_schedules(m: int, n: int, k: int, parts: int = 1) -> tuple[GemmSchedule, ...]:
    """Schedules worth timing and auditing at this shape: the default first, the canonical one last."""
    default = default_gemm_schedule(m, n, k, parts)
    k_part = -(-k // parts)
    candidates = [default, replace(default, early_k=0)]
    if m <= 128:
        candidates += [replace(default, early_k=0, tma=not default.tma), replace(default, num_stages=3)]
        if not default.tma and m <= 32:
            candidates += [replace(default, early_k=early) for early in (128, 256, 512)]
            candidates.append(replace(default, tile_columns=32, tile_k=256, num_stages=3, early_k=0))
        if not default.tma and m <= 16:  # at 32 rows this one exceeds the shared memory of an H200
            candidates.append(replace(default, early_k=1024, num_stages=2, num_warps=8))
        if m > 32:
            candidates += [
                replace(default, tile_rows=default.tile_rows // 2),
                replace(default, tile_columns=128, tile_k=64, num_warps=8),
            ]
    else:
        candidates += [
            replace(default, tile_columns=128, num_stages=3),
            replace(default, tile_columns=128, num_stages=4),
            replace(default, tile_columns=128, num_stages=4, tma=False),
            replace(default, tile_rows=64, tile_columns=256, num_stages=4),
        ]
        if parts == 1:  # two accumulators of these spill
            candidates += [
                replace(default, tile_columns=128, num_stages=4, num_warps=4),
                replace(default, tile_columns=256, num_stages=3),
            ]
    usable = (s for s in candidates if s.early_k <= k_part and (not s.tma or _fits_tma(s, k, parts)))
    return (*dict.fromkeys(usable), CANONICAL_GEMM)


def dense_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    *,
    parts: int = 1,
    bias: torch.Tensor | None = None,
    schedule: GemmSchedule | None = None,
    pdl: bool = False,
) -> None:
    """``out = x @ w.T + bias``, all P parts added inside one program.

    Args:
        x: ``[M, K]`` bfloat16 or float32, contiguous; M may be zero.
        w: ``[N, K]`` in x's dtype, contiguous; not written by earlier kernels of the step.
        out: ``[M, N]`` in x's dtype (rounded once) or float32 (not rounded), contiguous.
        parts: P, at most ``MAX_SUMMED_PARTS``.
        bias: ``[N]`` in x's dtype, for outputs in x's dtype; None for none.
        schedule: Default from ``default_gemm_schedule``; fp32 takes the canonical one only.
        pdl: Dependent launch.

    A row's bits depend neither on the other rows nor on the schedule. No host sync.
    """
    if not 1 <= parts <= MAX_SUMMED_PARTS:
        raise ValueError(
            f"parts ({parts}) must be 1 to {MAX_SUMMED_PARTS} in one program; see dense_gemm_parts"
        )
    assert out.shape == (x.shape[0], w.shape[0]), f"out {list(out.shape)}, x {list(x.shape)}"
    assert out.dtype in (x.dtype, torch.float32), f"out is {out.dtype}, x {x.dtype}"
    if bias is not None:
        assert bias.shape == (w.shape[0],), f"bias {list(bias.shape)}, w {list(w.shape)}"
        assert bias.dtype == out.dtype == x.dtype, f"bias is {bias.dtype}, out {out.dtype}, x {x.dtype}"
    _launch(x, w, out, parts, True, schedule, pdl, bias)


def dense_gemm_parts(
    x: torch.Tensor,
    w: torch.Tensor,
    parts_out: torch.Tensor,
    *,
    schedule: GemmSchedule | None = None,
    pdl: bool = False,
) -> None:
    """The P chains of ``x @ w.T``, not added: a program per part; ``merge_residual_norm`` adds them.

    Args:
        x, w, schedule, pdl: As for ``dense_gemm``.
        parts_out: ``[M, P, N]`` float32, contiguous.

    A row's bits depend neither on the other rows nor on the schedule. No host sync.
    """
    m, parts, n = parts_out.shape
    assert (m, n) == (x.shape[0], w.shape[0]), f"parts_out {list(parts_out.shape)}, x {list(x.shape)}"
    assert parts_out.dtype == torch.float32, f"parts_out is {parts_out.dtype}"
    _launch(x, w, parts_out, parts, False, schedule, pdl)


def vendor_gemm(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, *, parts: int = 1) -> None:
    """The same through cuBLAS. Its bits are the chain's only at audited row counts (kernels/audit.py).

    Args:
        x: ``[M, K]`` bfloat16.
        w: ``[N, K]`` bfloat16.
        out: ``[M, N]`` bfloat16 (P = 1 only) or float32: the parts' sum, not rounded.
        parts: P, at most ``MAX_SUMMED_PARTS``. Part p is added to the sum of those before by the call that computes it.
    """
    assert x.dtype == w.dtype == torch.bfloat16, (
        f"x is {x.dtype}, w {w.dtype}: fp32 runs the canonical schedule"
    )
    if out.dtype != torch.float32:
        if parts != 1:
            raise ValueError(f"parts ({parts}) must be 1 for a {out.dtype} output: parts add in fp32")
        torch.mm(x, w.t(), out=out)
        return
    if not 1 <= parts <= MAX_SUMMED_PARTS:
        raise ValueError(f"parts ({parts}) must be 1 to {MAX_SUMMED_PARTS}")
    k_part = -(-x.shape[1] // parts)
    torch.ops.aten.mm.dtype_out(x[:, :k_part], w[:, :k_part].t(), torch.float32, out=out)
    for part in range(1, parts):
        columns = slice(part * k_part, (part + 1) * k_part)
        torch.ops.aten.addmm.dtype_out(out, x[:, columns], w[:, columns].t(), torch.float32, out=out)


def dense_gemm_parts_reference(x: torch.Tensor, w: torch.Tensor, parts: int) -> torch.Tensor:
    """``[M, P, N]`` float32 by fp32 matrix products: the value, not the bits."""
    k_part = -(-x.shape[1] // parts)
    columns = [slice(part * k_part, (part + 1) * k_part) for part in range(parts)]
    return torch.stack([x.float()[:, c] @ w.float()[:, c].t() for c in columns], dim=1)


def dense_gemm_reference(
    x: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, parts: int = 1
) -> torch.Tensor:
    """``[M, N]``: the parts added by the tree, rounded once to ``out_dtype``."""
    return tree_sum(dense_gemm_parts_reference(x, w, parts).unbind(1)).to(out_dtype)


def _fits_tma(schedule: GemmSchedule, k: int, parts: int) -> bool:
    """Rows of whole 16 bytes, no part that ends inside a tile, tiles within a descriptor's box."""
    aligned = k % 8 == 0 and (parts == 1 or (k % parts == 0 and (k // parts) % schedule.tile_k == 0))
    return aligned and max(schedule.tile_rows, schedule.tile_columns, schedule.tile_k) <= 256


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    parts: int,
    summed: bool,
    schedule: GemmSchedule | None,
    pdl: bool,
    bias: torch.Tensor | None = None,
) -> None:
    (m, k), n = x.shape, w.shape[0]
    assert w.shape[1] == k, f"x {list(x.shape)}, w {list(w.shape)}"
    assert w.dtype == x.dtype, f"x is {x.dtype}, w {w.dtype}"
    assert all(t.is_contiguous() for t in (x, w, out)), "x, w and out must be contiguous"
    if m == 0:
        return
    if schedule is None:
        schedule = CANONICAL_GEMM if x.dtype == torch.float32 else default_gemm_schedule(m, n, k, parts)
        if summed and parts > 1:
            schedule = replace(schedule, early_k=0)
    if x.dtype == torch.float32 and schedule != CANONICAL_GEMM:
        raise ValueError(f"schedule ({schedule}) must be CANONICAL_GEMM for float32 inputs")
    if schedule.early_k > -(-k // parts) or (schedule.early_k and summed and parts > 1):
        raise ValueError(
            f"early_k ({schedule.early_k}) must lie inside one part: K {k}, {parts} parts, {summed=}"
        )
    x_source: Any = x
    w_source: Any = w
    if schedule.tma:
        if not _fits_tma(schedule, k, parts):
            raise ValueError(f"schedule ({schedule}) must not use tma for K {k} in {parts} parts")
        w_source = TensorDescriptor.from_tensor(w, [schedule.tile_columns, schedule.tile_k])
        if not schedule.swap:
            x_source = TensorDescriptor.from_tensor(x, [schedule.tile_rows, schedule.tile_k])
    num_tiles = cdiv(m, schedule.tile_rows) * cdiv(n, schedule.tile_columns)
    _gemm_kernel[(num_tiles, 1 if summed else parts)](
        x_source, w_source, out, out if bias is None else bias, m,
        N=n, K=k, PARTS=parts, SUMMED=summed, BIAS=bias is not None,
        TILE_M=schedule.tile_rows, TILE_N=schedule.tile_columns, TILE_K=schedule.tile_k,
        EARLY_K=schedule.early_k, SWAP=schedule.swap, TMA=schedule.tma, GROUP=ROW_TILES_PER_GROUP, PDL=pdl,
        **launch_options(num_warps=schedule.num_warps, num_stages=schedule.num_stages, pdl=pdl),
    )  # fmt: skip


def _gemm_cost(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Launch metadata for Triton's profiler."""
    m, n, k = args["M"], args["N"], args["K"]
    out = args["out"]
    in_bytes = getattr(args["w"], "base", args["w"]).element_size()
    return {
        "name": f"dense_gemm_{m}x{n}x{k}_parts{args['PARTS']}",
        f"flops{8 * in_bytes}": 2 * m * n * k,
        "bytes": in_bytes * k * (m + n) + out.element_size() * out.numel(),
    }


@triton.jit
def _load_tile(  # type: ignore[no-untyped-def]
    source, rows, num_rows, features, k_end, K: tl.constexpr, MASK_ROWS: tl.constexpr, MASK_K: tl.constexpr
):
    """``source[rows, features]`` of a contiguous ``[num_rows, K]``; zeros from ``num_rows`` and ``k_end`` on."""
    pointers = source + rows.to(tl.int64)[:, None] * K + features[None, :]
    if MASK_ROWS and MASK_K:
        return tl.load(pointers, mask=(rows[:, None] < num_rows) & (features[None, :] < k_end), other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=rows[:, None] < num_rows, other=0.0)
    elif MASK_K:
        return tl.load(pointers, mask=features[None, :] < k_end, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _dot(a, b, acc, SWAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """``[TILE_M, TILE_N]``, or its transpose when swapped."""
    if SWAP:
        return tl.dot(b, a.T, acc, input_precision="ieee")
    else:
        return tl.dot(a, b.T, acc, input_precision="ieee")


@triton.jit
def chain_over_k(  # type: ignore[no-untyped-def]
    x, w, acc, M, first_row, first_column, begin,
    N: tl.constexpr, K: tl.constexpr, K_PART: tl.constexpr, EARLY_K: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """``acc`` continued over features ``begin + EARLY_K`` to ``begin + K_PART``, ascending, within K."""
    rows = first_row + tl.arange(0, TILE_M)
    columns = first_column + tl.arange(0, TILE_N)
    k_end = tl.minimum(begin + K_PART, K)
    MASK_N: tl.constexpr = N % TILE_N != 0
    MASK_K: tl.constexpr = (K % K_PART != 0) or ((K_PART - EARLY_K) % TILE_K != 0)
    for k in range(EARLY_K, K_PART, TILE_K):
        features = begin + k + tl.arange(0, TILE_K)
        if TMA:  # noqa: SIM108
            b = w.load([first_column, begin + k])
        else:
            b = _load_tile(w, columns, N, features, k_end, K, MASK_N, MASK_K)
        if TMA and not SWAP:
            a = x.load([first_row, begin + k])
        else:
            a = _load_tile(x, rows, M, features, k_end, K, True, MASK_K)
        acc = _dot(a, b, acc, SWAP)
    return acc


@triton.jit(do_not_specialize=["M"], launch_metadata=_gemm_cost)
def _gemm_kernel(  # type: ignore[no-untyped-def]
    x, w, out, bias, M,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, SUMMED: tl.constexpr, BIAS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, EARLY_K: tl.constexpr,
    SWAP: tl.constexpr, TMA: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, 1 or P); tiles in groups of GROUP row tiles that walk the columns together."""
    K_PART: tl.constexpr = (K + PARTS - 1) // PARTS
    NUM_COLUMN_TILES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    MASK_EARLY: tl.constexpr = K % K_PART != 0
    tile = tl.program_id(0)
    group = tile // (GROUP * NUM_COLUMN_TILES)
    rows_in_group = tl.minimum(tl.cdiv(M, TILE_M) - group * GROUP, GROUP)
    place = tile % (GROUP * NUM_COLUMN_TILES)
    first_row = (group * GROUP + place % rows_in_group) * TILE_M
    first_column = (place // rows_in_group) * TILE_N
    rows = first_row + tl.arange(0, TILE_M)
    columns = first_column + tl.arange(0, TILE_N)
    begin = tl.program_id(1) * K_PART
    k_end = tl.minimum(begin + K_PART, K)
    # Weights never change, so they may be read before the wait.
    if EARLY_K > 0:
        early = begin + tl.arange(0, EARLY_K)
        b = _load_tile(w, columns, N, early, k_end, K, N % TILE_N != 0, MASK_EARLY)
    wait_for_previous(PDL)
    acc = tl.zeros((TILE_N, TILE_M) if SWAP else (TILE_M, TILE_N), tl.float32)
    if SUMMED and PARTS > 1:
        # A zero that the compiler cannot see: it would fold "total + dot(a, b, 0)" into one longer chain.
        acc += tl.where(M < 0, 1.0, 0.0)
    total = acc
    if EARLY_K > 0:
        a = _load_tile(x, rows, M, early, k_end, K, True, MASK_EARLY)
        total = _dot(a, b, acc, SWAP)
    total = chain_over_k(
        x, w, total, M, first_row, first_column, begin,
        N, K, K_PART, EARLY_K, TILE_M, TILE_N, TILE_K, SWAP, TMA,
    )  # fmt: skip
    if SUMMED:
        for part in tl.static_range(1, PARTS):
            total += chain_over_k(
                x, w, acc, M, first_row, first_column, part * K_PART,
                N, K, K_PART, 0, TILE_M, TILE_N, TILE_K, SWAP, TMA,
            )  # fmt: skip
        starts = rows.to(tl.int64) * N
    else:
        starts = (rows.to(tl.int64) * PARTS + tl.program_id(1)) * N
    total = total.to(out.dtype.element_ty)
    if BIAS:
        shift = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
        shift = shift[:, None] if SWAP else shift[None, :]
        total = (total.to(tl.float32) + shift).to(out.dtype.element_ty)
    if SWAP:
        mask = (rows[None, :] < M) & (columns[:, None] < N)
        tl.store(out + starts[None, :] + columns[:, None], total, mask=mask)
    else:
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(out + starts[:, None] + columns[None, :], total, mask=mask)
