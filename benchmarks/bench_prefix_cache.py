"""Requests with one beginning, with the prefix cache and without: time to all first tokens and to the end, equal bits.

    python benchmarks/bench_prefix_cache.py --output benchmarks/results/prefix_cache_cpu.json
    python benchmarks/bench_prefix_cache.py --device cuda --output benchmarks/results/prefix_cache_h200.json
    torchrun --nproc-per-node 2 benchmarks/bench_prefix_cache.py --device cuda --output ...

On a GPU Qwen3-30B-A3B dimensions with dummy bf16 weights, 64 requests of 1,024 common and 128 own tokens, 32 outputs;
on the CPU the built-in model and a half of each. All arrive at once. ``off``: every request opts out. ``cold``: from an
empty cache. ``warm``: the prefix is there, no own part is. Medians of ``--repeats``; own parts are fresh in each.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from shapes import write_config

from moe_runtime.engine.llm import LLM, RequestOutput
from moe_runtime.engine.request import SamplingParams
from moe_runtime.launch.distributed import close_ranks, init_ranks

MODES = ("off", "cold", "warm")


def main() -> None:
    """Run all modes and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    group = init_ranks(options.device)
    on_gpu = options.device == "cuda"
    lengths = (
        {"prefix": 1024, "own": 128, "output": 32} if on_gpu else {"prefix": 512, "own": 64, "output": 16}
    )
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"max_num_seqs": options.requests, "max_num_batched_tokens": 512}
        model = "builtin"
        if on_gpu:
            model = str(write_config(Path(folder), num_hidden_layers=options.layers))
            settings |= {"load_format": "dummy", "max_model_len": 4096, "max_num_batched_tokens": 16384}
        llm = LLM(model, device=options.device, group=group, **settings)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "model": f"Qwen3-30B-A3B dimensions, {options.layers} layers, dummy bf16" if on_gpu else "builtin",
        "num_ranks": group.size,
        "num_requests": options.requests,
        **{f"num_{name}_tokens": number for name, number in lengths.items()},
        **_measure(llm, options.requests, options.repeats, lengths),
    }
    if group.rank == 0:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        for mode in MODES:
            row = result[mode]
            print(
                f"{mode}: first tokens {row['first_tokens_s']:.3f} s, all {row['all_s']:.3f} s, "
                f"{row['num_computed_tokens']} rows on rank 0"
            )
    llm.stop_engine()
    close_ranks(llm.group)


def _measure(llm: LLM, num_requests: int, repeats: int, lengths: dict[str, int]) -> dict[str, Any]:
    rng = random.Random(1)
    vocab_size = llm.limits.vocab_size
    prefix = [rng.randrange(vocab_size) for _ in range(lengths["prefix"])]
    params = SamplingParams(
        temperature=0.0, max_tokens=lengths["output"], ignore_eos=True, logprobs=1, seed=0
    )
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for repeat in range(repeats + 1):
        prompts = [
            [*prefix, *(rng.randrange(vocab_size) for _ in range(lengths["own"]))]
            for _ in range(num_requests)
        ]
        found: dict[str, list[RequestOutput]] = {}
        for mode in MODES:
            row, found[mode] = _run(llm, mode, prefix, prompts, params)
            if repeat:  # the first is the warm-up
                rows[mode].append(row)
        assert found["off"] == found["cold"] == found["warm"], "bits"
    return {
        mode: {name: statistics.median(row[name] for row in rows[mode]) for name in rows[mode][0]}
        for mode in MODES
    }


def _run(
    llm: LLM, mode: str, prefix: list[int], prompts: list[list[int]], params: SamplingParams
) -> tuple[dict[str, float], list[RequestOutput]]:
    params = replace(params, cache_prompt=mode != "off")
    first = replace(params, max_tokens=1)
    times: dict[str, float] = {}
    for name, wanted in (("first_tokens_s", first), ("all_s", params)):
        llm.flush_cache()
        if mode == "warm":
            llm.generate([prefix] * llm.num_engines, first)
        num_before = llm.engine.num_computed_tokens
        start_s = time.perf_counter()
        results = llm.generate(prompts, wanted)
        times[name] = time.perf_counter() - start_s
    return {**times, "num_computed_tokens": llm.engine.num_computed_tokens - num_before}, results


if __name__ == "__main__":
    main()
