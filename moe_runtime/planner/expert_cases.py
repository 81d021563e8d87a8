"""The expert kernels of both forms as benchmarks launch them: random routing, a layer of weights per launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from moe_runtime.kernels.experts_triton import down, gate_up
from moe_runtime.kernels.grouped_experts_triton import down_grouped, gate_up_grouped
from moe_runtime.kernels.norm_triton import combine_residual_norm
from moe_runtime.kernels.topk_triton import expert_order, expert_tiles, max_expert_tiles, topk
from moe_runtime.layers.cuda_decoder import MAX_DECODE_ROWS
from moe_runtime.planner.kernel_cases import MAX_COPY_BYTES, MIN_COPIES, SMOKE, Case, Cases, Launch, in_turn

__all__ = ["expert_cases"]


@dataclass(slots=True, kw_only=True)
class _Launches:
    """One of each per layer, and the experts that all layers' rows touch."""

    choices: list[Launch] = field(default_factory=list)
    ups: list[Launch] = field(default_factory=list)
    downs: list[Launch] = field(default_factory=list)
    chains: list[Launch] = field(default_factory=list)
    num_touched: int = 0


def expert_cases(cases: Cases, public_ms: Mapping[int, tuple[float, float]] | None = None) -> Iterator[Case]:
    """top-k, gate_up, down, combine, and all but top-k as one chain, at every row count.

    Args:
        cases: Setting and device.
        public_ms: By rows, milliseconds of another library's fused experts, balanced and skewed, to stand beside.
    """
    s = cases.setting
    layer_bytes = 6 * s.num_experts * s.width * s.hidden
    num_layers = 2 if s is SMOKE else min(MIN_COPIES, MAX_COPY_BYTES // layer_bytes)
    w13 = cases.normal(num_layers, s.num_experts, 2 * s.width, s.hidden)
    w2 = cases.normal(num_layers, s.num_experts, s.hidden, s.width)
    for m in s.expert_rows:
        yield from _cases_of(cases, m, w13, w2, (public_ms or {}).get(m))


def _cases_of(
    cases: Cases, m: int, w13: torch.Tensor, w2: torch.Tensor, public_ms: tuple[float, float] | None
) -> Iterator[Case]:
    s, few, num_pairs = cases.setting, m <= MAX_DECODE_ROWS, m * cases.setting.num_topk
    launches = (_few if few else _grouped)(cases, m, w13, w2)
    touched = launches.num_touched / len(w13)
    combine = cases.combine(m)
    choice_bytes = 4 * (m * s.num_experts + 2 * num_pairs)
    choice_bytes += 4 * s.num_experts * _capacity(m) if few else 12 * num_pairs
    up_bytes = 2 * (touched * 2 * s.width * s.hidden + m * s.hidden + num_pairs * s.width)
    down_bytes = 2 * (touched * s.width * s.hidden + num_pairs * (s.width + s.hidden))
    flops = 2 * num_pairs * s.width * s.hidden
    public = {}
    if public_ms is not None:
        balanced_ms, skewed_ms = public_ms
        public = {"vLLM 0.22.0, balanced": 1e3 * balanced_ms, "vLLM 0.22.0, power law": 1e3 * skewed_ms}
    name = "topk" if few else "topk + order + tiles"
    yield Case(kernel=name, rows=m, launches=launches.choices, num_bytes=choice_bytes)
    yield Case(kernel="gate_up", rows=m, launches=launches.ups, num_bytes=up_bytes, flops=2 * flops)
    yield Case(kernel="down", rows=m, launches=launches.downs, num_bytes=down_bytes, flops=flops)
    yield combine
    yield Case(
        kernel="experts as fused MoE", rows=m, launches=launches.chains,
        num_bytes=up_bytes + down_bytes + combine.num_bytes, flops=3 * flops, beside=public,
    )  # fmt: skip


def _few(cases: Cases, m: int, w13: torch.Tensor, w2: torch.Tensor) -> _Launches:
    s, pdl, launches = cases.setting, cases.pdl, _Launches()
    schedules = cases.table.experts(m, s.hidden, s.width)
    h, mid = cases.normal(m, s.hidden), cases.normal(m * s.num_topk, s.width)
    rows = cases.normal(m, s.num_topk, s.hidden)
    combine = cases.residual_norm(combine_residual_norm, rows)
    for up_weight, down_weight in zip(w13, w2, strict=True):
        slots = torch.empty(s.num_experts, _capacity(m), dtype=torch.int32, device=cases.device)
        choose, ids, weights = _choose(cases, m, slots)
        up = partial(gate_up, h, up_weight, slots, ids, mid, schedule=schedules.gate_up, pdl=pdl)
        second = partial(
            down, mid, down_weight, slots, ids, weights, rows, schedule=schedules.down, pdl=pdl
        )  # fmt: skip
        launches.choices.append(choose)
        launches.ups.append(up)
        launches.downs.append(second)
        launches.chains.append(in_turn(up, second, combine))
        launches.num_touched += len(set(ids.flatten().tolist()))
    return launches


def _grouped(cases: Cases, m: int, w13: torch.Tensor, w2: torch.Tensor) -> _Launches:
    s, pdl, launches = cases.setting, cases.pdl, _Launches()
    num_pairs = m * s.num_topk
    schedules = cases.table.grouped_experts(num_pairs, s.num_experts, s.hidden, s.width)
    max_tiles = max_expert_tiles(num_pairs, s.num_experts, schedules.row_tile)
    h, mid = cases.normal(m, s.hidden), cases.normal(num_pairs, s.width)
    rows = cases.normal(m, s.num_topk, s.hidden)
    combine = cases.residual_norm(combine_residual_norm, rows)
    for up_weight, down_weight in zip(w13, w2, strict=True):
        choose, ids, weights = _choose(cases, m, None)
        order = expert_order(ids, s.num_experts)
        tiles = expert_tiles(order.first_row, schedules.row_tile, max_tiles)
        place = partial(_place, ids, s.num_experts, schedules.row_tile, max_tiles, pdl)
        up = partial(
            gate_up_grouped, h, up_weight, order, tiles, mid,
            gathered=rows.view(num_pairs, -1), schedule=schedules.gate_up, pdl=pdl,
        )  # fmt: skip
        second = partial(
            down_grouped, mid, down_weight, order, tiles, weights, rows, schedule=schedules.down, pdl=pdl
        )
        launches.choices.append(in_turn(choose, place))
        launches.ups.append(up)
        launches.downs.append(second)
        launches.chains.append(in_turn(place, up, second, combine))
        launches.num_touched += len(set(ids.flatten().tolist()))
    return launches


def _choose(cases: Cases, m: int, slots: torch.Tensor | None) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """top-k of random logits, launched once; its ids and weights."""
    s = cases.setting
    logits = torch.randn(m, s.num_experts, device=cases.device)
    ids = torch.empty(m, s.num_topk, dtype=torch.int32, device=cases.device)
    weights = torch.empty(m, s.num_topk, device=cases.device)
    count = torch.tensor([m], dtype=torch.int32, device=cases.device)
    choose = partial(
        topk, logits, count, s.num_topk, True, ids, weights, slots,
        schedule=cases.table.topk(m), pdl=cases.pdl,
    )  # fmt: skip
    choose()
    return choose, ids, weights


def _place(ids: torch.Tensor, num_experts: int, tile_rows: int, max_tiles: int, pdl: bool) -> None:
    """Counting sort and tiles, as the grouped form launches them."""
    order = expert_order(ids, num_experts, pdl=pdl)
    expert_tiles(order.first_row, tile_rows, max_tiles, pdl=pdl)


def _capacity(m: int) -> int:
    """Of the slot table of M rows, as ``CudaDecoder`` chooses it."""
    return max(16, 1 << (m - 1).bit_length())
