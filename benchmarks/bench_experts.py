"""Times of top-k and of the expert kernels on one GPU, for the dimensions of Qwen3-30B-A3B.

Each figure is the median over graph replays of a chain of launches over eight layers of distinct weights (9.7 GB), so
that weights come from memory and not from L2; routing is uniform and differs by layer. ``python bench_experts.py
[--all] [--out FILE]``: ``--all`` times every schedule, else the defaults.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from moe_runtime.kernels.expert_tile_triton import gather_rows
from moe_runtime.kernels.experts_triton import (
    DOWN_SCHEDULES,
    GATE_UP_SCHEDULES,
    default_expert_schedules,
    down,
    expert_cost,
    gate_up,
)
from moe_runtime.kernels.grouped_experts_triton import (
    CANONICAL_GROUPED,
    GROUPED_DOWN_SCHEDULES,
    GROUPED_GATE_UP_SCHEDULES,
    GroupedSchedule,
    default_grouped_schedules,
    down_grouped,
    gate_up_grouped,
)
from moe_runtime.kernels.topk_triton import (
    TOPK_SCHEDULES,
    ExpertOrder,
    ExpertTiles,
    default_topk_schedule,
    expert_order,
    expert_tiles,
    max_expert_tiles,
    topk,
)

__all__ = ["PUBLIC_FUSED_MOE_MS", "bench_experts"]

NUM_EXPERTS, NUM_TOPK, HIDDEN, WIDTH, NUM_LAYERS = 128, 8, 2048, 768, 8
DECODE_ROWS = (1, 2, 4, 8, 32, 128)
PREFILL_ROWS = (512, 4096, 8192)
CAPACITY = 128
REPLAYS = 7

PUBLIC_FUSED_MOE_MS = {
    1: (0.0382, 0.0351),
    2: (0.0520, 0.0504),
    4: (0.0883, 0.0859),
    8: (0.1638, 0.1265),
    32: (0.2986, 0.2548),
    128: (0.3063, 0.3053),
    512: (0.3437, 0.3446),
    4096: (0.8497, 0.9872),
    8192: (1.5876, 1.7235),
}
"""Fused MoE (both GEMMs, activation, sum over slots) of vLLM 0.22.0 on one H200, bf16, EP 1: ms with balanced and with
power-law (1.01) routing. Source: ai-dynamo/aiconfigurator, Apache-2.0. Ours: no sum over slots, random routing."""


def bench_experts(
    device: torch.device | str = "cuda", *, all_schedules: bool = False
) -> list[dict[str, Any]]:
    """One dict per measurement: kernel, rows, schedule, default, us, tb_s, tflops, active experts, public_ms.

    Args:
        device: A CUDA device.
        all_schedules: Every schedule, not only the default one.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.empty(shape, device=device, dtype=torch.bfloat16)
        return values.normal_(0.0, scale, generator=generator)

    w13 = [normal(NUM_EXPERTS, 2 * WIDTH, HIDDEN, scale=0.02) for _ in range(NUM_LAYERS)]
    w2 = [normal(NUM_EXPERTS, HIDDEN, WIDTH, scale=0.02) for _ in range(NUM_LAYERS)]
    results: list[dict[str, Any]] = []
    for num_rows in DECODE_ROWS:
        results += _decode(num_rows, normal, w13, w2, all_schedules)
    for num_rows in PREFILL_ROWS:
        results += _prefill(num_rows, normal, w13, w2, all_schedules)
    return results


def _decode(
    num_rows: int,
    normal: Callable[..., torch.Tensor],
    w13: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    all_schedules: bool,
) -> list[dict[str, Any]]:
    h = normal(num_rows, HIDDEN)
    mid, rows = normal(num_rows * NUM_TOPK, WIDTH), normal(num_rows, NUM_TOPK, HIDDEN)
    logits = [normal(num_rows, NUM_EXPERTS).float() for _ in w13]
    routing = [_route(layer_logits, CAPACITY) for layer_logits in logits]
    count = torch.tensor([num_rows], dtype=torch.int32, device=h.device)
    num_active = sum(float((table >= 0).any(1).sum()) for _, _, table in routing) / len(routing)
    layers = list(zip(w13, w2, routing, logits, strict=True))
    default = default_expert_schedules(num_rows)
    results = []

    def add(
        kernel: str, schedule: Any, is_default: bool, launch: Callable[[], None], columns: int, depth: int
    ) -> None:
        cost = expert_cost(num_rows * NUM_TOPK, round(num_active), depth, columns) if depth else (0, 0)
        results.append(_row(kernel, num_rows, schedule, is_default, launch, cost, num_active))

    for topk_schedule in TOPK_SCHEDULES:
        is_default = topk_schedule == default_topk_schedule(num_rows)
        if is_default or all_schedules:

            def select(schedule: Any = topk_schedule) -> None:
                for _, _, (ids, weights, table), layer_logits in layers:
                    topk(
                        layer_logits, count, NUM_TOPK, True, ids, weights, table, schedule=schedule, pdl=True
                    )

            add("topk", topk_schedule, is_default, select, 0, 0)
    for schedule in GATE_UP_SCHEDULES:
        is_default = schedule == default.gate_up
        if is_default or (all_schedules and (schedule.mode == "per_expert" or num_rows <= 8)):

            def first(schedule: Any = schedule) -> None:
                for up_weight, _, (ids, _, table), _ in layers:
                    gate_up(h, up_weight, table, ids, mid, schedule=schedule, pdl=True)

            add("gate_up", schedule, is_default, first, 2 * WIDTH, HIDDEN)
    for schedule in DOWN_SCHEDULES:
        is_default = schedule == default.down
        if is_default or (all_schedules and (schedule.mode == "per_expert" or num_rows <= 8)):

            def second(schedule: Any = schedule) -> None:
                for _, down_weight, (ids, weights, table), _ in layers:
                    down(mid, down_weight, table, ids, weights, rows, schedule=schedule, pdl=True)

            add("down", schedule, is_default, second, HIDDEN, WIDTH)

    def both() -> None:
        for up_weight, down_weight, (ids, weights, table), _ in layers:
            gate_up(h, up_weight, table, ids, mid, pdl=True)
            down(mid, down_weight, table, ids, weights, rows, pdl=True)

    add("gate_up+down", None, True, both, 3 * WIDTH, HIDDEN)
    return results


def _prefill(
    num_rows: int,
    normal: Callable[..., torch.Tensor],
    w13: Sequence[torch.Tensor],
    w2: Sequence[torch.Tensor],
    all_schedules: bool,
) -> list[dict[str, Any]]:
    num_pairs = num_rows * NUM_TOPK
    h, gathered = normal(num_rows, HIDDEN), normal(num_pairs, HIDDEN)
    mid, rows = normal(num_pairs, WIDTH), normal(num_rows, NUM_TOPK, HIDDEN)
    routing = [_route(normal(num_rows, NUM_EXPERTS).float(), 0) for _ in w13]
    orders = [expert_order(ids, NUM_EXPERTS) for ids, _, _ in routing]
    layers = list(zip(w13, w2, routing, orders, strict=True))
    default = default_grouped_schedules(num_pairs, NUM_EXPERTS)
    results = []

    def tiles_of(order: ExpertOrder, tile_rows: int) -> ExpertTiles:
        return expert_tiles(
            order.first_row, tile_rows, max_expert_tiles(num_pairs, NUM_EXPERTS, tile_rows), pdl=True
        )

    def add(
        kernel: str, schedule: Any, is_default: bool, launch: Callable[[], None], columns: int, depth: int
    ) -> None:
        cost = expert_cost(num_pairs, NUM_EXPERTS, depth, columns) if depth else (0, 0)
        results.append(_row(kernel, num_rows, schedule, is_default, launch, cost, NUM_EXPERTS))

    def place() -> None:
        for _, _, (ids, _, _), _ in layers:
            tiles_of(expert_order(ids, NUM_EXPERTS, pdl=True), default.row_tile)

    def copy() -> None:
        for _, _, _, order in layers:
            gather_rows(h, order, gathered, pdl=True)

    add("order+tiles", None, True, place, 0, 0)
    add("gather_rows", None, True, copy, 0, 0)
    tiles = {size: [tiles_of(order, size) for order in orders] for size in (16, 32, 64, 128)}

    def up_of(schedule: GroupedSchedule) -> Callable[[], None]:
        def launch() -> None:
            for (weight, _, _, order), cut in zip(layers, tiles[schedule.row_tile], strict=True):
                gate_up_grouped(h, weight, order, cut, mid, gathered=gathered, schedule=schedule, pdl=True)

        return launch

    def down_of(schedule: GroupedSchedule) -> Callable[[], None]:
        def launch() -> None:
            for (_, weight, (_, weights, _), order), cut in zip(
                layers, tiles[schedule.row_tile], strict=True
            ):
                down_grouped(mid, weight, order, cut, weights, rows, schedule=schedule, pdl=True)

        return launch

    for schedule in GROUPED_GATE_UP_SCHEDULES:
        if schedule == default.gate_up or (all_schedules and schedule != CANONICAL_GROUPED):
            add("gate_up_grouped", schedule, schedule == default.gate_up, up_of(schedule), 2 * WIDTH, HIDDEN)
    for schedule in GROUPED_DOWN_SCHEDULES:
        if schedule == default.down or (all_schedules and schedule != CANONICAL_GROUPED):
            add("down_grouped", schedule, schedule == default.down, down_of(schedule), HIDDEN, WIDTH)

    def all_of() -> None:
        for up_weight, down_weight, (ids, weights, _), _ in layers:
            order = expert_order(ids, NUM_EXPERTS, pdl=True)
            cut = tiles_of(order, default.row_tile)
            gate_up_grouped(h, up_weight, order, cut, mid, gathered=gathered, pdl=True)
            down_grouped(mid, down_weight, order, cut, weights, rows, pdl=True)

    add("order+gate_up+down", None, True, all_of, 3 * WIDTH, HIDDEN)
    return results


def _route(logits: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows, device = logits.shape[0], logits.device
    ids = torch.empty(num_rows, NUM_TOPK, dtype=torch.int32, device=device)
    weights = torch.empty(num_rows, NUM_TOPK, device=device)
    table = torch.empty(NUM_EXPERTS, capacity, dtype=torch.int32, device=device)
    count = torch.tensor([num_rows], dtype=torch.int32, device=device)
    topk(logits, count, NUM_TOPK, True, ids, weights, table if capacity else None)
    return ids, weights, table


def _row(
    kernel: str,
    num_rows: int,
    schedule: Any,
    is_default: bool,
    launch: Callable[[], None],
    cost: tuple[int, int],
    num_active: float,
) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": kernel, "rows": num_rows, "default": is_default, "active": num_active}
    row["schedule"] = asdict(schedule) if schedule else {}
    try:
        time_us = _graph_us(launch) / NUM_LAYERS
    except Exception as error:  # a schedule that a device refuses is a result, too
        return row | {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    row |= {
        "us": round(time_us, 2),
        "tflops": round(cost[0] / time_us / 1e6, 1),
        "tb_s": round(cost[1] / time_us / 1e6, 3),
    }
    if "gate_up+down" in kernel:
        row["public_ms"] = PUBLIC_FUSED_MOE_MS[num_rows]
    return row


def _graph_us(launch: Callable[[], None]) -> float:
    """Median time of a replay of ``launch`` captured in a graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        graph.replay()
        times: list[float] = []
        for _ in range(REPLAYS):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[REPLAYS // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of the expert kernels")
    parser.add_argument("--all", action="store_true", help="every schedule")
    parser.add_argument("--out", help="write the measurements as JSON")
    arguments = parser.parse_args()
    results = bench_experts(all_schedules=arguments.all)
    for row in results:
        label = " ".join(str(value) for value in row["schedule"].values())
        figures = (
            row.get("error") or f"{row['us']:9.2f} us {row['tb_s']:6.3f} TB/s {row['tflops']:6.1f} TFLOP/s"
        )
        public = f" public {row['public_ms']} ms" if "public_ms" in row else ""
        print(
            f"{row['kernel']:20} M {row['rows']:5} {'*' if row['default'] else ' '} {figures}{public}  {label}"
        )
    if arguments.out:
        with open(arguments.out, "w", encoding="ascii") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}, file
            )


if __name__ == "__main__":
    main()
