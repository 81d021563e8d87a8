"""Placement planners: time, balance against the bound, against plain greedy and against an exact solver, bytes moved.

    python benchmarks/bench_eplb.py --output benchmarks/results/eplb_cpu.json          # minutes
    python benchmarks/bench_eplb.py --exact --output benchmarks/results/eplb_exact.json  # up to a minute per problem

Plans are made on the first half of a window and judged on both halves. Times are medians of the process's CPU time over
repeats of planning the whole model, one thread; wall time beside it says how busy the machine was.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from placement_windows import WINDOWS, make_window

from moe_runtime.eplb.balance import balance_of, peak_bound
from moe_runtime.eplb.incremental import plan_incremental
from moe_runtime.eplb.loads import fixed_point_shift
from moe_runtime.eplb.packing import pack
from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement, even_slots
from moe_runtime.eplb.policy import plan_placement
from moe_runtime.eplb.replication import replicate

NUM_LAYERS, NUM_EXPERTS = 58, 256
EXPERT_BYTES = 3 * 7168 * 2048
"""DeepSeek-V3, one byte per weight."""
SIZES = [(8, 0), (8, 32), (32, 0), (32, 32), (64, 0), (64, 32)]
"""EP size, redundant experts."""
REPEATS = 5
MILLE = (900, 950, 980)

Row = dict[str, Any]


def timed(function: Callable[[], ModelPlacement]) -> tuple[ModelPlacement, Row]:
    """The result, and medians of CPU and wall milliseconds."""
    cpu, wall = [], []
    for _ in range(REPEATS):
        start = time.process_time(), time.perf_counter()
        result = function()
        cpu.append((time.process_time() - start[0]) * 1e3)
        wall.append((time.perf_counter() - start[1]) * 1e3)
    return result, {"cpu_ms": statistics.median(cpu), "wall_ms": statistics.median(wall)}


def greedy_over_bound(counts: np.ndarray, slots: tuple[int, ...], *, apart: bool) -> np.ndarray:
    """Peak over bound of plain greedy replication and packing, per layer."""
    shift = fixed_point_shift(counts, sum(slots))
    loads = counts << shift
    peak = pack(loads, replicate(loads, slots, apart=apart), slots, apart=apart).peak / (1 << shift)
    return peak / peak_bound(counts, slots)


def quality(kind: str, ep_size: int, redundant: int, certified_layers: int) -> Row:
    """Plans of one window: both objectives, both halves."""
    from exact_placement import certified_bound

    window = make_window(kind, NUM_LAYERS, NUM_EXPERTS)
    first, second = window[:8], window[8:]
    slots = even_slots(NUM_EXPERTS + redundant, ep_size)
    total, total_time = timed(lambda: plan_placement(first, slots))
    steady, steady_time = timed(lambda: plan_placement(first, slots, objective="steps"))
    start = contiguous_model_placement(NUM_LAYERS, NUM_EXPERTS, ep_size, redundant)
    planned = balance_of(first, total)
    greedy = greedy_over_bound(first.sum(axis=0), slots, apart=True)
    plainest = greedy_over_bound(first.sum(axis=0), slots, apart=False)
    ours = planned.over_bound
    certified = [
        float(planned.peak[i]) / certified_bound(first[:, i].sum(axis=0), slots, float(planned.peak[i]))
        for i in np.argsort(-ours, kind="stable")[:certified_layers]
    ]
    return {
        "window": kind,
        "ep_size": ep_size,
        "redundant": redundant,
        "over_bound_median": float(np.median(ours)),
        "over_bound_max": float(ours.max()),
        "over_certified_max": max(certified),
        "certified_layers": certified_layers,
        "greedy_over_bound_median": float(np.median(greedy)),
        "greedy_over_bound_max": float(greedy.max()),
        "worse_than_greedy_layers": int((ours > np.minimum(greedy, plainest) * (1 + 1e-7)).sum()),
        "total": total_time,
        "steps": steady_time,
        "balancedness": {
            name: {
                "planned": balance_of(first, placement).overall,
                "planned_by_bucket": balance_of(first, placement, by_bucket=True).overall,
                "held_out": balance_of(second, placement).overall,
                "held_out_by_bucket": balance_of(second, placement, by_bucket=True).overall,
            }
            for name, placement in (("start", start), ("total", total), ("steps", steady))
        },
    }


def incremental(ep_size: int, redundant: int) -> list[Row]:
    """Bytes moved after a quarter of the load has drifted, to several targets, against the full plan."""
    before = make_window("power 0.8", NUM_LAYERS, NUM_EXPERTS)[:8].sum(axis=0)
    other = make_window("power 0.8", NUM_LAYERS, NUM_EXPERTS, seed=1)[:8].sum(axis=0)
    now = (3 * before + other) // 4
    slots = even_slots(NUM_EXPERTS + redundant, ep_size)
    current = plan_placement(before, slots)
    rows = []
    for target in MILLE:
        start = time.process_time()
        plan = plan_incremental(now, current, target_permille=target)
        cpu_ms = (time.process_time() - start) * 1e3
        rows.append(
            {
                "ep_size": ep_size,
                "redundant": redundant,
                "target_permille": target,
                "before": balance_of(now, current).overall,
                "after": balance_of(now, plan.placement).overall,
                "full": balance_of(now, plan.full_placement).overall,
                "moved_experts": len(plan.moves),
                "full_moved_experts": len(plan.full_moves),
                "moved_bytes": plan.moves.num_bytes(EXPERT_BYTES),
                "full_moved_bytes": plan.full_moves.num_bytes(EXPERT_BYTES),
                "cpu_ms": cpu_ms,
            }
        )
    return rows


def exact(time_limit_s: float) -> list[Row]:
    """Our peak against the solver's, first on full size without copies, then on smaller problems with them."""
    from exact_placement import solve_exactly

    problems = [(kind, 256, ep, 0) for kind in ("power 0.6", "power 1.2", "bursty 0.6") for ep in (8, 32, 64)]
    problems += [(kind, 256, 8, 32) for kind in ("power 0.8",)]
    problems += [
        (kind, 24, 4, 4) for kind in ("power 0.6", "power 0.8", "power 1.0", "power 1.2", "bursty 1.0")
    ]
    problems += [
        ("power 0.8", 16, 4, 4),
        ("power 1.2", 16, 4, 4),
        ("power 0.8", 32, 8, 8),
        ("power 1.2", 32, 8, 8),
    ]
    rows = []
    for kind, num_experts, ep_size, redundant in problems:
        counts = make_window(kind, 1, num_experts)[:8].sum(axis=0)
        slots = even_slots(num_experts + redundant, ep_size)
        peak = float(balance_of(counts, plan_placement(counts, slots)).peak[0])
        found = solve_exactly(counts, slots, time_limit_s=time_limit_s, gap=1e-3, upper=peak)
        rows.append(
            {
                "window": kind,
                "num_experts": num_experts,
                "ep_size": ep_size,
                "redundant": redundant,
                "ended": found.is_optimal,
                "seconds": found.seconds,
                "over_exact": peak / found.value if found.is_optimal else None,
                "over_solver_bound": peak / found.bound if found.bound > 0 else None,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def fewest(time_limit_s: float) -> list[Row]:
    """Experts moved against the fewest that reach as low a peak, without copies."""
    from exact_placement import fewest_moves

    rows = []
    for num_experts, ep_size in ((256, 8), (64, 8), (32, 4)):
        before = make_window("power 0.8", 1, num_experts)[:8].sum(axis=0)
        other = make_window("power 0.8", 1, num_experts, seed=1)[:8].sum(axis=0)
        now = (3 * before + other) // 4
        slots = even_slots(num_experts, ep_size)
        current = plan_placement(before, slots)
        plan = plan_incremental(now, current, target_permille=950)
        peak = float(balance_of(now, plan.placement).peak[0]) + 1e-6
        holds = np.empty(num_experts, dtype=np.int64)
        holds[current.physical_to_logical_map[0]] = current.rank_of_physical
        found = fewest_moves(now[0], holds, slots, peak=peak, time_limit_s=time_limit_s)
        rows.append(
            {
                "num_experts": num_experts,
                "ep_size": ep_size,
                "moved": len(plan.moves),
                "full_moved": len(plan.full_moves),
                "fewest": found.value if found.is_optimal else None,
                "fewest_bound": found.bound,
                "seconds": found.seconds,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def markdown(results: Row) -> str:
    """The tables of docs/eplb.md."""
    lines = [
        "| window | EP | redundant | peak / bound, median (max) | greedy, median (max) | peak / proven, max "
        "| held out: before, total, steps | CPU ms: total, steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results.get("quality", []):
        held = [row["balancedness"][name]["held_out_by_bucket"] for name in ("start", "total", "steps")]
        lines.append(
            f"| {row['window']} | {row['ep_size']} | {row['redundant']} "
            f"| {row['over_bound_median']:.4f} ({row['over_bound_max']:.4f}) "
            f"| {row['greedy_over_bound_median']:.4f} ({row['greedy_over_bound_max']:.4f}) "
            f"| {row['over_certified_max']:.4f} | {', '.join(f'{h:.3f}' for h in held)} "
            f"| {row['total']['cpu_ms']:.0f}, {row['steps']['cpu_ms']:.0f} |"
        )
    lines += [
        "",
        "| EP | redundant | target | balancedness before, after, full plan | experts moved | full plan "
        "| GB moved | full plan | CPU ms |",
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for row in results.get("incremental", []):
        lines.append(
            f"| {row['ep_size']} | {row['redundant']} | {row['target_permille'] / 1000} "
            f"| {row['before']:.3f}, {row['after']:.3f}, {row['full']:.3f} | {row['moved_experts']} "
            f"| {row['full_moved_experts']} | {row['moved_bytes'] / 1e9:.1f} | {row['full_moved_bytes'] / 1e9:.1f} "
            f"| {row['cpu_ms']:.0f} |"
        )
    return "\n".join(lines)


def one_row_a_line(results: Row) -> str:
    """JSON in which each row of a list has a line."""
    parts = []
    for name, value in results.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in value) + "\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--exact", action="store_true", help="only the comparison with the exact solver")
    parser.add_argument("--time-limit-s", type=float, default=60.0, help="of the solver, per problem")
    parser.add_argument(
        "--certified-layers",
        type=int,
        default=4,
        help="layers, those highest above the bound, held against a proven bound",
    )
    args = parser.parse_args()
    results: Row = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        },
        "numpy": np.__version__,
        "layers": NUM_LAYERS,
        "experts": NUM_EXPERTS,
    }
    if args.exact:
        results |= {"exact": exact(args.time_limit_s), "fewest_moves": fewest(args.time_limit_s)}
    else:
        results["quality"] = [
            quality(kind, ep, redundant, args.certified_layers) for kind in WINDOWS for ep, redundant in SIZES
        ]
        results["incremental"] = [row for ep, redundant in SIZES for row in incremental(ep, redundant)]
        print(markdown(results))
    args.output.write_text(one_row_a_line(results))


if __name__ == "__main__":
    main()
