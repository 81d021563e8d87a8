"""Speculative decoding against plain decoding: output tokens per second of the same requests, and equal bits.

    python benchmarks/bench_speculative.py --output benchmarks/results/speculative_cpu.json
    python benchmarks/bench_speculative.py --device cuda --output benchmarks/results/speculative_h200.json

On the CPU the built-in model; on a GPU Qwen3-30B-A3B dimensions with dummy bf16 weights. Greedy, end-of-sequence
ignored. Workloads, by what drafts: ``repetitive``, n-grams where the prompt is one phrase over and over; ``random``,
n-grams where nothing repeats but what the model itself repeats; ``right``, a drafter that knows the answers, the most
that can be gained; ``wrong``, one whose drafts never are, the most that can be lost where nothing pauses.
Plain and drafted runs take turns; medians of ``--repeats`` after a warm-up of each. On the CPU, where a rank is one
thread, seconds are those of the process, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shapes import write_config

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.speculative import Speculation
from moe_runtime.verify.drafting import KnowingProposer

PHRASE_TOKENS = 16
PROMPT_TOKENS = 128
WORKLOADS = ("repetitive", "random", "right", "wrong")


def main() -> None:
    """Run every workload at every batch size and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--num-output", type=int, default=128)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    llm = _load(options.device, options.num_speculative_tokens, options.layers)
    device = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"CPU, {os.cpu_count()} cores, one thread"
    )
    result: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "model": llm.config.model if options.device == "cpu" else "Qwen3-30B-A3B dimensions, dummy bf16",
        "num_layers": llm.model.plan.config.num_layers,
        "num_speculative_tokens": options.num_speculative_tokens,
        "num_output_tokens": options.num_output,
        "clock": "of the process" if options.device == "cpu" else "wall",
        "rows": [],
    }
    for workload in options.workloads:
        for num_seqs in options.num_seqs:
            row = _measure(llm, workload, num_seqs, options.num_output, options.repeats)
            result["rows"].append(row)
            print(
                f"{workload:10} {num_seqs:3} sequences: {row['plain_tokens_per_s']:8.1f} tokens/s plain, "
                f"{row['drafted_tokens_per_s']:8.1f} drafted, {row['ratio']:.2f} times; "
                f"{row['num_accepted']} of {row['num_drafted']} drafts right",
                flush=True,
            )
            options.output.write_text(json.dumps(result, indent=1) + "\n")


def _load(device: str, most_drafts: int, num_layers: int) -> LLM:
    common: dict[str, Any] = {
        "speculative": "ngram",
        "num_speculative_tokens": most_drafts,
        "max_num_seqs": 64,
        "device": device,
    }
    if device == "cpu":
        return LLM("builtin", max_model_len=512, **common)
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), num_hidden_layers=num_layers)
        return LLM(str(model), load_format="dummy", max_model_len=4096, max_num_batched_tokens=8192, **common)


def _measure(llm: LLM, workload: str, num_seqs: int, num_output: int, repeats: int) -> dict[str, Any]:
    engine = llm.engine
    ngram = engine.speculation
    prompts = _prompts(workload, num_seqs, llm.limits.vocab_size)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=num_output, ignore_eos=True, logprobs=0)
    engine.speculation = None
    reference, _ = _run(llm, prompts, params)
    drafting: Speculation = ngram
    if workload in ("right", "wrong"):
        answers = {str(i): output.outputs[0].token_ids for i, output in enumerate(reference)}
        proposer = KnowingProposer(workload, answers, llm.limits.vocab_size)
        drafting = Speculation(proposer, ngram.most_drafts, paced=False)
    plain_s, drafted_s = [], []
    before = drafting.stats()
    for repeat in range(repeats + 1):
        engine.speculation = None
        outputs, plain = _run(llm, prompts, params)
        engine.speculation = drafting
        with_drafts, drafted = _run(llm, prompts, params)
        if outputs != reference or with_drafts != reference:
            raise RuntimeError(f"{workload}, {num_seqs} sequences: drafts have changed bits")
        if repeat:
            plain_s.append(plain)
            drafted_s.append(drafted)
    engine.speculation = ngram
    after = drafting.stats()
    num_tokens = num_seqs * num_output
    rates = [num_tokens / statistics.median(times_s) for times_s in (plain_s, drafted_s)]
    return {
        "workload": workload,
        "num_seqs": num_seqs,
        "plain_tokens_per_s": rates[0],
        "drafted_tokens_per_s": rates[1],
        "ratio": rates[1] / rates[0],
        "num_drafted": (after.num_draft_tokens - before.num_draft_tokens) // (repeats + 1),
        "num_accepted": (after.num_accepted_tokens - before.num_accepted_tokens) // (repeats + 1),
    }


def _run(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[list[Any], float]:
    """Outputs, and seconds, in which the prompts' share is small."""
    clock = time.process_time if llm.config.device == "cpu" else time.perf_counter
    start_s = clock()
    outputs = llm.generate(prompts, params)
    return outputs, clock() - start_s


def _prompts(workload: str, num_seqs: int, vocab_size: int) -> list[list[int]]:
    rng = random.Random(f"{workload} {num_seqs}")
    if workload != "repetitive":
        return [[rng.randrange(vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_seqs)]
    phrases = [[rng.randrange(vocab_size) for _ in range(PHRASE_TOKENS)] for _ in range(num_seqs)]
    return [phrase * (PROMPT_TOKENS // PHRASE_TOKENS) for phrase in phrases]


if __name__ == "__main__":
    main()
