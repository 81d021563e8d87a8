"""Which schedules agree on this machine: a fact to be tried, not assumed.

For the CPU the short form runs at start-up, on the loaded shapes. It proves position invariance of the canonical
schedule (a row alone, zero-padded, against the same row at another place among other rows; a column tile alone against
the same tile among others) on normal, heavy-tailed and cancelling data, fp32 outputs compared bit for bit. It then
tries the taller row tiles and allows those that agree. A control whose tree is changed on purpose must differ, or the
data could not have shown a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from moe_runtime.kernels.activation import swiglu
from moe_runtime.kernels.attention import BLOCK_SIZE, make_attention_plan, paged_attention
from moe_runtime.kernels.gemm import PARTS, linear_fp32, pack_weight
from moe_runtime.kernels.rms_norm import rms_norm
from moe_runtime.kernels.schedules import (
    CANDIDATE_ROW_TILES,
    COLUMN_TILE,
    ROW_TILE,
    Control,
    control,
    set_row_tiles,
)
from moe_runtime.kernels.softmax import log_softmax

__all__ = ["AuditReport", "audit_shapes", "hostile_rows"]

MAX_AUDITED_COLUMNS = 256


@dataclass(slots=True, kw_only=True)
class AuditReport:
    """What the audit found.

    Attributes:
        row_tiles: Allowed row tiles by chain length K.
        failures: One sentence per op whose canonical schedule is not position invariant; empty is a pass.
        num_comparisons: Bitwise comparisons made.
    """

    row_tiles: dict[int, tuple[int, ...]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    num_comparisons: int = 0

    def check(self, what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare bit for bit and note a failure."""
        self.num_comparisons += 1
        if not torch.equal(actual, expected):
            self.failures.append(
                f"{what}: {int((actual != expected).sum())} of {actual.numel()} elements differ"
            )


def hostile_rows(kind: str, num_rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    """``[num_rows, width]`` float32 of a kind that shows changes of order.

    Args:
        kind: ``normal``; ``heavy_tailed``: normal times powers of two over 24 binades; ``cancelling``: pairs of large
            opposite values with small ones between.
        num_rows, width: Shape.
        generator: Source of randomness.
    """
    x = torch.randn(num_rows, width, generator=generator)
    if kind == "heavy_tailed":
        return x * torch.exp2(torch.randint(-12, 13, x.shape, generator=generator).float())
    if kind == "cancelling":
        large = torch.randn(num_rows, -(-width // 2), generator=generator).abs() * 4096.0
        pairs = torch.stack([large, -large], dim=-1).flatten(1)[:, :width]
        return pairs + x
    return x


def audit_shapes(
    gemm_shapes: Sequence[tuple[int, int, str]], head_dim: int, hidden: int, vocab_size: int
) -> AuditReport:
    """The short form: every GEMM (K, N, role), attention, and the row-wise ops of a model.

    Records the allowed row tiles as a side effect (``schedules.set_row_tiles``).
    """
    report = AuditReport()
    generator = torch.Generator().manual_seed(20260601)
    for k, n, role in dict.fromkeys(gemm_shapes):
        _audit_gemm(report, k, min(n, MAX_AUDITED_COLUMNS), PARTS[role], role, generator)
    _audit_attention(report, head_dim, generator)
    for width, name, op in _row_ops(hidden, vocab_size):
        _audit_row_op(report, f"{name} over {width}", op, width, generator)
    return report


def _row_ops(hidden: int, vocab_size: int) -> list[tuple[int, str, Callable[[torch.Tensor], torch.Tensor]]]:
    weight = torch.ones(hidden)
    return [
        (hidden, "rms_norm", lambda x: rms_norm(x, weight, 1e-6)),
        (2 * hidden, "swiglu", swiglu),
        (vocab_size, "log_softmax", log_softmax),
    ]


def _audit_gemm(
    report: AuditReport, k: int, n: int, parts: int, role: str, generator: torch.Generator
) -> None:
    k_part = -(-k // parts)
    set_row_tiles(k_part, report.row_tiles.get(k_part, (ROW_TILE,)))
    allowed = []
    control_differs = False
    weight = torch.randn(n, k, generator=generator)
    packed = pack_weight(weight, parts)
    last_tile = pack_weight(weight[-(((n - 1) % COLUMN_TILE) + 1) :], parts)
    for kind in ("normal", "heavy_tailed", "cancelling"):
        x = hostile_rows(kind, max(CANDIDATE_ROW_TILES), k, generator)
        set_row_tiles(k_part, (ROW_TILE,))
        canonical = linear_fp32(x, packed)
        name = f"GEMM K={k} N={n} ({role}), {kind} data"
        for row in (0, 5, 37):
            report.check(
                f"{name}: row {row} alone", linear_fp32(x[row : row + 1], packed), canonical[row : row + 1]
            )
        moved = torch.cat([x[11:14], x[:7]])
        report.check(f"{name}: rows moved", linear_fp32(moved, packed)[3:], canonical[:7])
        report.check(
            f"{name}: last column tile alone",
            linear_fp32(x, last_tile),
            canonical[:, n - last_tile.num_columns_out :],
        )
        reversed_k = linear_fp32(x.flip(1), pack_weight(weight.flip(1), parts))
        control_differs |= not torch.equal(reversed_k, canonical)
        for tile in CANDIDATE_ROW_TILES:
            set_row_tiles(k_part, (tile, ROW_TILE))
            allowed.append((tile, torch.equal(linear_fp32(x, packed), canonical)))
    if not control_differs:
        report.failures.append(f"GEMM K={k} ({role}): the control with K reversed does not differ")
    good = {tile for tile, _ in allowed} - {tile for tile, equal in allowed if not equal}
    before = report.row_tiles.get(k_part)
    if before is not None:
        good &= set(before)
    report.row_tiles[k_part] = (*sorted(good - {ROW_TILE}, reverse=True), ROW_TILE)
    set_row_tiles(k_part, report.row_tiles[k_part])


def _audit_attention(report: AuditReport, head_dim: int, generator: torch.Generator) -> None:
    num_keys, scale = 5 * BLOCK_SIZE + 9, head_dim**-0.5
    num_blocks = -(-num_keys // BLOCK_SIZE)
    table = list(range(num_blocks))
    shape = (num_blocks, 2, BLOCK_SIZE, head_dim)
    k = torch.randn(shape, generator=generator)
    q = torch.randn(num_keys, 4, head_dim, generator=generator)
    for kind in ("normal", "heavy_tailed", "cancelling"):
        v = hostile_rows(kind, num_blocks * 2 * BLOCK_SIZE, head_dim, generator).view(shape)

        def attend(start: int, length: int, v: torch.Tensor = v) -> torch.Tensor:
            plan = make_attention_plan([length], [start], [table], 2)
            return paged_attention(q[start : start + length], k, v, plan, scale, None)

        whole = attend(0, num_keys)
        for start, length in ((num_keys - 1, 1), (BLOCK_SIZE - 1, 1), (BLOCK_SIZE, 3), (255, 70)):
            what = f"attention head_dim={head_dim}, {kind} data: {length} rows from {start}"
            report.check(what, attend(start, length), whole[start : start + length])
        with control(Control.BATCH_ATTENTION):
            if torch.equal(attend(0, num_keys), whole):
                report.failures.append("attention: the control with other chunks does not differ")


def _audit_row_op(
    report: AuditReport,
    name: str,
    op: Callable[[torch.Tensor], torch.Tensor],
    width: int,
    generator: torch.Generator,
) -> None:
    for kind in ("normal", "heavy_tailed"):
        x = hostile_rows(kind, 19, width, generator)
        whole = op(x)
        for row in (0, 18):
            report.check(f"{name}, {kind} data: row {row} alone", op(x[row : row + 1]), whole[row : row + 1])
        report.check(f"{name}, {kind} data: rows moved", op(x[3:12]), whole[3:12])
