"""Logits to tokens and logprobs: microseconds beside torch's operators, and agreement with the CPU's tokens.

Times are medians of replays of a CUDA graph that holds the operation ten times, with dependent launch, divided by ten;
logits are where the head leaves them: in L2 as far as they fit. Run on one GPU:

    python benchmarks/bench_sampling.py --output results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moe_runtime.kernels import sampling
from moe_runtime.kernels.ranks_triton import KEY_SCHEDULES
from moe_runtime.kernels.sampling import RowSampling
from moe_runtime.kernels.sampling_triton import SAMPLE_SCHEDULES, SamplingRows, greedy, sample
from moe_runtime.kernels.softmax_triton import (
    STATS_SCHEDULES,
    log_softmax_stats,
    token_logprobs,
    top_logprobs,
)

__all__ = ["bench_sampling", "count_agreement"]

VOCAB = 151936
ROW_COUNTS = (1, 8, 32, 128)
SETTINGS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "min-p 0.05": {"min_p": 0.05},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 200": {"top_k": 200},
    "top-k 200, top-p 0.95": {"top_k": 200, "top_p": 0.95},
}
SPREAD = 3.0  # standard deviation of the logits
PDL = True
NUM_IN_GRAPH = 10
NUM_REPLAYS = 20

Launch = Callable[[], object]
Row = dict[str, Any]


def bench_sampling(device: torch.device | str) -> list[Row]:
    """One row of results per operation, number of rows and schedule."""
    generator = torch.Generator(device).manual_seed(0)
    all_logits = SPREAD * torch.randn(max(ROW_COUNTS), VOCAB, device=device, generator=generator)
    results: list[Row] = []
    for num_rows in ROW_COUNTS:
        for name, schedule, launch in _operations(all_logits[:num_rows].clone()):
            shown = None if schedule is None else asdict(schedule)
            results.append({"op": name, "rows": num_rows, "us": _time_us(launch), "schedule": shown})
    return results + [count_agreement(device, name) for name in SETTINGS]


def count_agreement(device: torch.device | str, name: str, num_rows: int = 128) -> Row:
    """How many of ``num_rows`` tokens the CPU chooses as well, from the same logits."""
    logits = SPREAD * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(1))
    settings = [RowSampling(seed=i, position=i, **SETTINGS[name]) for i in range(num_rows)]
    out = torch.zeros(num_rows, dtype=torch.int64, device=device)
    sample(logits.to(device), SamplingRows.of(settings, device), out)
    expected = sampling.sample(logits, settings)
    num_equal = sum(a == b for a, b in zip(out.tolist(), expected, strict=True))
    return {"op": f"agreement with the CPU, {name}", "rows": num_rows, "num_equal": num_equal}


def _operations(logits: torch.Tensor) -> Iterator[tuple[str, Any, Launch]]:
    """Name, schedule and launch of each operation on these logits."""
    num_rows, device = logits.shape[0], logits.device
    out = torch.zeros(num_rows, dtype=torch.int64, device=device)
    stats = log_softmax_stats(logits)
    yield "torch.argmax", None, partial(torch.argmax, logits, dim=1)
    yield "torch.log_softmax", None, partial(torch.log_softmax, logits, dim=1)
    yield "torch.topk 20", None, partial(torch.topk, logits, 20, dim=1)
    yield "torch.sort", None, partial(torch.sort, logits, dim=1, descending=True, stable=True)
    yield "token_logprobs", None, partial(token_logprobs, logits, stats, out, pdl=PDL)
    for stats_schedule in STATS_SCHEDULES:
        launch: Launch = partial(log_softmax_stats, logits, schedule=stats_schedule, pdl=PDL)
        yield "log_softmax_stats", stats_schedule, launch
    for key_schedule in KEY_SCHEDULES:
        yield "greedy", key_schedule, partial(greedy, logits, out, schedule=key_schedule, pdl=PDL)
        for num_top in (5, 20):
            launch = partial(top_logprobs, logits, stats, num_top, schedule=key_schedule, pdl=PDL)
            yield f"top_logprobs {num_top}", key_schedule, launch
    for name, options in SETTINGS.items():
        rows = SamplingRows.of([RowSampling(seed=i, **options) for i in range(num_rows)], device)
        for schedule in SAMPLE_SCHEDULES:
            yield f"sample, {name}", schedule, partial(sample, logits, rows, out, schedule=schedule, pdl=PDL)


def _time_us(launch: Launch) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(NUM_IN_GRAPH):
                launch()
        graph.replay()
        times_us: list[float] = []
        for _ in range(NUM_REPLAYS):
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times_us.append(1e3 * start.elapsed_time(end) / NUM_IN_GRAPH)
    return statistics.median(times_us)


def _table(results: list[Row]) -> str:
    """The best time of each operation by number of rows, then the agreement."""
    best: dict[str, dict[int, float]] = {}
    for result in results:
        if "us" in result:
            times = best.setdefault(result["op"], {})
            times[result["rows"]] = min(result["us"], times.get(result["rows"], float("inf")))
    lines = [f"{'us, best schedule':32s}" + "".join(f"{f'R={num}':>10s}" for num in ROW_COUNTS)]
    for op, times in best.items():
        lines.append(f"{op:32s}" + "".join(f"{times[num]:10.1f}" for num in ROW_COUNTS))
    lines += [f"{r['op']}: {r['num_equal']} of {r['rows']}" for r in results if "num_equal" in r]
    return "\n".join(lines)


def main() -> None:
    """Run, print the table, write the rows as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="JSON file for all rows")
    arguments = parser.parse_args()
    results = bench_sampling("cuda")
    print(_table(results))
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
