"""The planner's predictions beside recorded runs of the engine on H200, before and after calibration.

    python benchmarks/predict_runs.py

Runs are those of ``bench_engine.py`` (``results/engine_h200*.json``). Predictions replay what
the scheduler runs there, step by step, through the cost model; they are made of times of kernels and transports alone,
and of the host's part of a step, which TP 2 adds to the device's. Before calibration: the datasheet's rates, two
microseconds a launch, no host.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from shapes import QWEN3_30B_A3B

from moe_runtime.planner.cost_model import CostModel, ScheduledTokens, Topology
from moe_runtime.planner.hardware import Hardware, load_hardware
from moe_runtime.planner.shape_configs import read_shape

__all__ = ["Prediction", "predictions"]

RESULTS = Path(__file__).with_name("results")
TOKEN_BUDGET = 16384
DECODE_IN, DECODE_OUT = 128, 128
RUNS = (
    # GPUs, tensor-parallel ranks, file, commit
    (1, 1, "engine_h200.json", "1ecd013"),
    (2, 1, "engine_h200_x2.json", "f48b7ba"),
    (2, 1, "engine_h200_x2.json", "6815d7c"),
    (2, 2, "engine_h200_tp2.json", "8181d00"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One run: what was measured, what is predicted, in the unit of ``what``; errors as shares of the measured."""

    what: str
    num_gpus: int
    tp: int
    commit: str
    measured: float
    uncalibrated: float
    calibrated: float

    @property
    def error(self) -> float:
        return self.calibrated / self.measured - 1

    @property
    def error_before(self) -> float:
        return self.uncalibrated / self.measured - 1


def predictions(hardware: Hardware | None = None) -> Iterator[Prediction]:
    """Every recorded run that the planner can be held against.

    Args:
        hardware: The calibrated device; the product's own file of the H200 by default.
    """
    device = hardware or load_hardware("h200")
    for num_gpus, tp, name, commit in RUNS:
        run = _recorded(json.loads((RESULTS / name).read_text()), tp, commit)
        before, after = (
            CostModel(read_shape(QWEN3_30B_A3B), d, Topology(ep_size=num_gpus, tp=tp), greedy=True)
            for d in (load_hardware("h200").uncalibrated(), device)
        )
        cases = [(f"decode, {n} sequences, ms", ms, _decode_ms, int(n)) for n, ms in run["decode_ms"].items()]
        for key, what, predict, number in (
            ("prefill_tokens_per_s", "prefill 16 x 2,048, tokens/s", _prefill_rate, 16),
            ("throughput_output_tokens_per_s", "256 requests 512/128, output tokens/s", _throughput, 256),
        ):
            if key in run:
                cases.append((what, run[key], predict, number))
        for what, measured, predict, number in cases:
            yield Prediction(
                what=what,
                num_gpus=num_gpus,
                tp=tp,
                commit=commit,
                measured=measured,
                uncalibrated=predict(before, number),
                calibrated=predict(after, number),
            )


def _recorded(content: dict[str, Any], tp: int, commit: str) -> dict[str, Any]:
    """The run of a commit by the engine's own schedules; or of a file as the benchmark writes it, of one run."""
    if "runs" not in content:
        assert content.get("tp", 1) == tp, f"tp of the run ({content.get('tp')}) must be {tp}"
        return {"decode_ms": {str(row["num_seqs"]): row["ms"] for row in content["decode"]}}
    return next(
        run
        for run in content["runs"]
        if (run["commit"], run.get("tp", 1)) == (commit, tp)
        and "vendor" not in run.get("note", "") + run.get("command", "")
    )


def _decode_ms(model: CostModel, num_seqs: int) -> float:
    """Mean over the steps of a run of 128 in, 128 out."""
    shares = _shares(num_seqs, model.topology.num_groups)
    steps = [
        model.step_seconds([[(1, DECODE_IN + i, True)] * n for n in shares]) for i in range(1, DECODE_OUT)
    ]
    return 1e3 * float(np.mean(steps))


def _prefill_rate(model: CostModel, num_seqs: int) -> float:
    shares = _shares(num_seqs, model.topology.num_groups)
    return num_seqs * 2048 / _run_s(model, shares, 2048, 1)


def _throughput(model: CostModel, num_seqs: int) -> float:
    shares = _shares(num_seqs, model.topology.num_groups)
    return num_seqs * 128 / _run_s(model, shares, 512, 128)


def _run_s(model: CostModel, shares: list[int], num_in: int, num_out: int) -> float:
    """A closed batch: prompts as far as the budget goes, decodes first; the host's first step stands before all."""
    per_step = TOKEN_BUDGET // num_in
    total_s = 1e-6 * float(model.host_us(np.float64(max(shares))))
    ages = [[0] * n for n in shares]  # tokens that each sequence has got
    while any(age < num_out for group in ages for age in group):
        step: list[list[ScheduledTokens]] = []
        for group in ages:
            ready = [i for i, age in enumerate(group) if 0 < age < num_out]
            room = (TOKEN_BUDGET - len(ready)) // num_in if ready else per_step
            fresh = [i for i, age in enumerate(group) if age == 0][:room]
            step.append(
                [(1, num_in + group[i], True) for i in ready] + [(num_in, num_in, False)] * len(fresh)
            )
            for i in (*ready, *fresh):
                group[i] += 1
        total_s += model.step_seconds(step)
    return total_s


def _shares(num_seqs: int, num_groups: int) -> list[int]:
    return [num_seqs // num_groups + (group < num_seqs % num_groups) for group in range(num_groups)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def main() -> None:
    """Print the table."""
    names = ("GPUs", "commit", "run", "measured", "predicted", "error", "error before calibration")
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for p in predictions():
        gpus = f"{p.num_gpus}, TP {p.tp}" if p.tp > 1 else f"{p.num_gpus}"
        values = _number(p.measured), _number(p.calibrated), f"{p.error:+.1%}", f"{p.error_before:+.1%}"
        print(f"| {' | '.join((gpus, p.commit, p.what.replace('1 sequences', '1 sequence'), *values))} |")


if __name__ == "__main__":
    main()
