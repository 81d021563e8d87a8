"""What a move of experts costs the steps beside it, and what it moves: incremental plans against full ones.

    torchrun --nproc-per-node 2 benchmarks/bench_rearrange.py --output rearrange_cpu.json
    torchrun --nproc-per-node 2 benchmarks/bench_rearrange.py --device cuda --output rearrange_h200_x2.json

``stall``: every rank decodes the same number of sequences; steps are timed on each rank's host, first without a move,
then with one random placement after another, so that nearly all experts of a rank change with each. Reported of the
rank with the longest: median step, median and longest step while something moves, longest step with a swap before it.
``bytes``: plans for skewed windows of loads, no engine. On a GPU: Qwen3-30B-A3B dimensions, dummy bf16 weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from placement_windows import make_window
from shapes import write_config

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.incremental import plan_incremental
from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement
from moe_runtime.launch.distributed import close_ranks, init_ranks

SHAPES = {
    "Qwen3-30B-A3B, EP 2": (48, 128, 2, 3 * 2048 * 768 * 2),
    "DeepSeek-V3, EP 8": (58, 256, 8, 3 * 7168 * 2048),
    "DeepSeek-V3, EP 32": (58, 256, 32, 3 * 7168 * 2048),
}
"""Layers with experts, experts, ranks, bytes of an expert (bf16, fp8)."""


def main() -> None:
    """Run the parts asked for and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", default="stall,bytes")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--num-seqs", type=int, default=8, help="of each rank")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--layers", type=int, default=48, help="of the model on a GPU")
    parser.add_argument("--redundant", type=int, default=0)
    options = parser.parse_args()
    group = init_ranks(options.device)
    result: dict[str, Any] = {"torch": torch.__version__, "device": options.device, "num_ranks": group.size}
    if "stall" in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            settings: dict[str, Any] = {"device": "cpu"}
            model = "builtin"
            if options.device == "cuda":
                model = str(write_config(Path(folder), num_hidden_layers=options.layers))
                settings = {"device": "cuda", "load_format": "dummy", "max_model_len": 4096}
                result["gpu"] = torch.cuda.get_device_name()
            if group.size == 1:
                settings |= {"dispatcher": "loopback", "loopback_ranks": 2}
            llm = LLM(
                model,
                group=group,
                num_redundant_experts=options.redundant,
                rearrange_interval=1 << 40,  # moves come from here
                max_num_seqs=max(64, options.num_seqs),
                **settings,
            )
        stall = _Stall(llm, options.num_seqs, options.tokens).run()
        ranks = [msgspec.json.decode(d) for d in llm.group.all_gather_bytes(msgspec.json.encode(stall))]
        result["stall"] = max(ranks, key=lambda rank: rank["longest_moving_ms"])
        llm.close()
        group = replace(llm.group, links=None)
    if group.rank == 0:
        if "bytes" in options.parts:
            result["bytes"] = list(_plans())
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result, indent=1))
    close_ranks(group)


class _Stall:
    """Times the steps of one rank's engine."""

    def __init__(self, llm: LLM, num_seqs: int, num_tokens: int) -> None:
        self.llm = llm
        self.num_prompts = num_seqs * llm.num_engines
        self.params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self.moves = False
        self.rng = np.random.default_rng(0)
        self.steps: list[tuple[float, bool, bool]] = []
        self._step = llm.engine.step
        llm.engine.step = self.timed_step  # type: ignore[method-assign]

    def timed_step(self, **options: Any) -> Any:
        mover = self.llm.engine.mover
        assert mover is not None, "the interval asks for one"
        if (
            self.moves
            and self.llm.group.rank == 0
            and not mover.is_active
            and options.get("num_pending") == 0
        ):
            now = mover.placement
            rows = self.rng.permuted(now.physical_to_logical_map, axis=1)
            if len(self.steps) < self.params.max_tokens - 20:  # the last one ends before the batch
                mover.request(replace(now, physical_to_logical_map=rows))
        layers_before, start_s = sum(mover.versions), time.perf_counter()
        found = self._step(**options)
        ms = (time.perf_counter() - start_s) * 1e3
        if not found[0].is_empty and found[0].is_decode:
            self.steps.append((ms, mover.is_active, sum(mover.versions) > layers_before))
        return found

    def generate(self, *, moves: bool) -> list[tuple[float, bool, bool]]:
        self.moves, self.steps = moves, []
        prompts = [[1 + i % 50, 2, 3] for i in range(self.num_prompts)]
        self.llm.generate(prompts, self.params)
        return self.steps

    def run(self) -> dict[str, float]:
        mover = self.llm.engine.mover
        assert mover is not None, "the interval asks for one"
        self.generate(moves=False)
        still = [ms for ms, _, _ in self.generate(moves=False)]
        before = mover.stats()
        steps = self.generate(moves=True)
        after = mover.stats()
        moving = [ms for ms, is_active, _ in steps if is_active]
        swaps = [ms for ms, _, has_swapped in steps if has_swapped]
        num_layers = after.num_layers - before.num_layers
        if not swaps:
            raise SystemExit(f"{num_layers} layers were swapped, none before a decode step: more --tokens")
        return {
            "num_seqs": self.num_prompts,
            "num_steps": len(still),
            "median_ms": statistics.median(still),
            "p99_ms": float(np.percentile(still, 99)),
            "longest_ms": max(still),
            "median_moving_ms": statistics.median(moving),
            "p99_moving_ms": float(np.percentile(moving, 99)),
            "longest_moving_ms": max(moving),
            "median_swap_ms": statistics.median(swaps),
            "longest_swap_ms": max(swaps),
            "longest_moving_over_median": max(moving) / statistics.median(still),
            "p99_moving_over_median": float(np.percentile(moving, 99)) / statistics.median(still),
            "steps_moving": len(moving),
            "rearrangements": after.outcomes.get("succeeded", 0) - before.outcomes.get("succeeded", 0),
            "layers_moved": num_layers,
            "stall_us_per_layer": (after.stall_s - before.stall_s) / max(1, num_layers) * 1e6,
            "received_bytes": after.num_bytes - before.num_bytes,
            "spare_bytes": after.spare_bytes,
        }


def _plans() -> Iterator[dict[str, Any]]:
    """Bytes that plans move, from consecutive ids and then again as the load drifts on."""
    for name, (num_layers, num_experts, size, expert_bytes) in SHAPES.items():
        for kind in ("power 0.8", "power 1.2", "topics"):
            window = make_window(kind, num_layers, num_experts)
            halves = [window[:8].sum(axis=0), window[8:].sum(axis=0)]
            current: ModelPlacement = contiguous_model_placement(num_layers, num_experts, size, size)
            for when, counts in zip(("first", "again"), halves, strict=True):
                start_s = time.perf_counter()
                plan = plan_incremental(counts, current)
                yield {
                    "shape": name,
                    "window": kind,
                    "plan": when,
                    "plan_ms": (time.perf_counter() - start_s) * 1e3,
                    "balancedness": [
                        round(balance_of(counts, p).overall, 4)
                        for p in (current, plan.placement, plan.full_placement)
                    ],
                    "incremental_bytes": plan.moves.num_bytes(expert_bytes),
                    "full_bytes": plan.full_moves.num_bytes(expert_bytes),
                }
                current = plan.placement


if __name__ == "__main__":
    main()
