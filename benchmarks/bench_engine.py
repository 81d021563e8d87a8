"""The offline engine on ranks, GPUs by default: decode step times, prefill, throughput, and equal bits beside them.

    python benchmarks/bench_engine.py --output benchmarks/results/engine_h200.json
    torchrun --nproc-per-node 2 benchmarks/bench_engine.py --output benchmarks/results/engine_h200_x2.json

Qwen3-30B-A3B dimensions, dummy bf16 weights, uniform token ids, end-of-sequence ignored. A decode step is (time for 128
outputs minus time for 1) / 127, through the whole engine: scheduling, sampling and copies included. Medians of
``--repeats`` after a warm-up. Numbers of sequences and tokens are those of all ranks together. The digest of the
reference batch's ids and logprobs is one for every number of ranks and every dispatcher.

Not by default: ``steady`` keeps ``--seqs-per-rank`` sequences on every rank for ``--steady-tokens`` outputs, a decode
step as above; ``halves`` runs prefill in whole, half and quarter steps; ``first`` times the first token of one prompt
on an idle engine: as the engine runs it, in the mixed form, and in that form launched kernel by kernel.
``--device cpu --model builtin`` is a small form.
"""

from __future__ import annotations

import argparse
import builtins
import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from shapes import write_config

from moe_runtime.engine import device_copies
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.launch.distributed import close_ranks, init_ranks

BYTE_FLOOR_MS = {
    1: {1: 1.4, 8: 6.1, 32: 12.5, 128: 14.6},
    2: {1: 1.05, 8: 3.4, 32: 6.4, 128: 7.3},
}
"""By ranks and sequences: bytes of weights and keys that the busier rank must read a step, at 4.5 TB/s."""
STEADY_PROMPT_TOKENS = 128
FIRST_LENGTHS = (8, 40, 80, 256, 257, 384, 512, 768, 1024, 1536, 2048, 2049)


def parse_options(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--parts", default="bits,decode,prefill,throughput")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=("qwen3-30b-a3b", "builtin"), default="qwen3-30b-a3b")
    parser.add_argument("--seqs-per-rank", type=int, default=256, help="of steady, and most that a rank runs")
    parser.add_argument("--steady-tokens", type=int, default=1024, help="outputs of a sequence")
    parser.add_argument("--prefill-prompts", type=int, default=16, help="of all ranks together")
    parser.add_argument("--prefill-tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--audit-cache", help="folder of an audit's findings, for vendor GEMMs")
    parser.add_argument("--dispatcher", default="auto")
    parser.add_argument("--loopback-ranks", type=int, default=8)
    parser.add_argument("--tp", type=int, default=1)
    return parser.parse_args(args)


def main() -> None:
    """Run the parts asked for and write one JSON file."""
    options = parse_options()
    group = init_ranks(options.device)
    if group.rank > 0:
        builtins.print = lambda *args, **kwargs: None
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "model": "built-in",
    }
    if options.model != "builtin":
        result |= {"model": "Qwen3-30B-A3B dimensions, dummy bf16", "num_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"model": "builtin", "max_num_batched_tokens": 512}
        if options.model != "builtin":
            model = write_config(Path(folder), num_hidden_layers=options.layers)
            settings = {"model": str(model), "load_format": "dummy", "max_model_len": 4096}
            settings["max_num_batched_tokens"] = 16384
        start_s = time.perf_counter()
        llm = LLM(
            **settings,
            device=options.device,
            max_num_seqs=options.seqs_per_rank,
            enforce_eager=options.eager,
            audit_cache=options.audit_cache,
            dispatcher=options.dispatcher,
            loopback_ranks=options.loopback_ranks,
            tp=options.tp,
            group=group,
        )
        _synchronize(llm)
    result["num_ranks"] = group.size
    result["dispatcher"] = llm.transport.name
    result["tp"], result["tp_transport"] = options.tp, llm.model.tensor_parallel.transport
    if options.device == "cuda":
        result["exchange_bytes"] = llm.model.decoder.experts.num_bytes
    result["load_s"] = time.perf_counter() - start_s
    print(
        f"loaded in {result['load_s']:.1f} s, {llm.limits.max_kv_tokens // 64} KV blocks, {llm.transport}, "
        f"{result.get('exchange_bytes', 0) / 2**20:.0f} MiB of exchange buffers",
        flush=True,
    )
    bench = _Bench(llm, options)
    for part in options.parts.split(","):
        start_s = time.perf_counter()
        result[part] = getattr(bench, part)()
        print(f"{part} took {time.perf_counter() - start_s:.1f} s", flush=True)
        if group.rank == 0:
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    llm.stop_engine()  # captured graphs hold on to communicators
    close_ranks(llm.group)


class _Bench:
    """One loaded engine."""

    def __init__(self, llm: LLM, options: argparse.Namespace) -> None:
        self.llm, self.options = llm, options
        self.repeats: int = options.repeats
        self.generator = torch.Generator().manual_seed(1)

    def prompts(self, num: int, length: int) -> list[list[int]]:
        vocab = self.llm.limits.vocab_size
        return torch.randint(0, vocab, (num, length), generator=self.generator).tolist()

    def run_s(self, num: int, num_in: int, num_out: int) -> float:
        prompts = self.prompts(num, num_in)
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        _synchronize(self.llm)
        start_s = time.perf_counter()
        self.llm.generate(prompts, params)
        _synchronize(self.llm)
        return time.perf_counter() - start_s

    def decode(self) -> list[dict[str, float]]:
        """Milliseconds per decode step at 1, 8, 32, 128 sequences, 128 in, 128 out."""
        rows = []
        for num in (1, 8, 32, 128):
            self.run_s(num, 128, 128)
            steps = [
                (self.run_s(num, 128, 128) - self.run_s(num, 128, 1)) / 127 * 1e3 for _ in range(self.repeats)
            ]
            ms = statistics.median(steps)
            host_ms = self.host_ms(num)
            row = {"num_seqs": num, "ms": ms, "host_ms": host_ms}
            floor_ms = BYTE_FLOOR_MS.get(self.llm.group.size, {}).get(num)
            if floor_ms is not None:
                row |= {"floor_ms": floor_ms}
            rows.append(row)
            print(f"decode {num}: {json.dumps(row)}", flush=True)
        return rows

    def host_ms(self, num: int) -> float:
        """Milliseconds per step that the host is not waiting for the device: planning, launching, taking results."""
        waited_s = 0.0
        wait = device_copies.DeviceEvent.wait

        def timed_wait(event: Any, *limits: Any) -> None:
            nonlocal waited_s
            start_s = time.perf_counter()
            wait(event, *limits)
            waited_s += time.perf_counter() - start_s

        device_copies.DeviceEvent.wait = timed_wait
        num_steps = self.llm.engine.num_steps
        try:
            total_s = self.run_s(num, 128, 128)
        finally:
            device_copies.DeviceEvent.wait = wait
        return (total_s - waited_s) / (self.llm.engine.num_steps - num_steps) * 1e3

    def prefill(self) -> dict[str, float]:
        """Prefill tokens per second, by default of 16 prompts of 2,048 tokens."""
        num, length = self.options.prefill_prompts, self.options.prefill_tokens
        self.run_s(num, length, 1)
        rates = [num * length / self.run_s(num, length, 1) for _ in range(self.repeats)]
        print(f"prefill: {statistics.median(rates):,.0f} tokens/s", flush=True)
        return {"tokens_per_s": statistics.median(rates), "num_prompts": num, "prompt_tokens": length}

    def first(self) -> list[dict[str, float]]:
        """Milliseconds to the first token of one prompt, nothing else running, by its length."""
        runner, rows = self.llm.engine.runner, []
        usual = runner.most_prompt_rows, runner.most_mixed_rows
        forms = {"ms": usual, "mixed_ms": (0, usual[1]), "launched_ms": (0, 0)}
        for length in FIRST_LENGTHS:
            row: dict[str, float] = {"prompt_tokens": length}
            for form, most in forms.items():
                runner.most_prompt_rows, runner.most_mixed_rows = most
                self.run_s(1, length, 1)
                row[form] = statistics.median(self.run_s(1, length, 1) for _ in range(self.repeats)) * 1e3
            rows.append(row)
            print(f"first token: {json.dumps(row)}", flush=True)
        runner.most_prompt_rows, runner.most_mixed_rows = usual
        return rows

    def halves(self) -> dict[str, float]:
        """Prefill with steps of half as many tokens: what two micro-batches cost before anything of theirs overlaps."""
        usual = self.llm.config.max_num_batched_tokens
        per_step = self.options.prefill_prompts * self.options.prefill_tokens // self.llm.group.size // 2
        rates = {}
        for name, limit in (("whole", usual), ("half", per_step), ("quarter", per_step // 2)):
            self.llm.reconfigure(max_num_batched_tokens=limit)
            print(f"steps of at most {limit} tokens a rank", flush=True)
            rates[f"{name}_tokens_per_s"] = self.prefill()["tokens_per_s"]
        self.llm.reconfigure(max_num_batched_tokens=usual)
        return rates

    def steady(self) -> dict[str, float]:
        """A full batch on every rank for many steps: ms per step, and output tokens per second with and without
        prefill."""
        num, num_out = self.options.seqs_per_rank * self.llm.group.size, self.options.steady_tokens
        self.run_s(num, STEADY_PROMPT_TOKENS, 4)
        first_s = statistics.median(self.run_s(num, STEADY_PROMPT_TOKENS, 1) for _ in range(self.repeats))
        whole_s = statistics.median(
            self.run_s(num, STEADY_PROMPT_TOKENS, num_out) for _ in range(self.repeats)
        )
        ms = (whole_s - first_s) / (num_out - 1) * 1e3
        rate = num / ms * 1e3
        print(f"steady, {num} sequences: {ms:.2f} ms per step, {rate:,.0f} tokens/s", flush=True)
        return {
            "num_seqs": num,
            "prompt_tokens": STEADY_PROMPT_TOKENS,
            "output_tokens": num_out,
            "ms": ms,
            "decode_tokens_per_s": rate,
            "output_tokens_per_s": num * num_out / whole_s,
        }

    def throughput(self) -> dict[str, float]:
        """Output tokens per second, 256 requests of 512 in, 128 out."""
        self.run_s(256, 512, 16)
        rates = [256 * 128 / self.run_s(256, 512, 128) for _ in range(self.repeats)]
        print(f"throughput: {statistics.median(rates):,.0f} output tokens/s", flush=True)
        return {"output_tokens_per_s": statistics.median(rates)}

    def bits(self) -> dict[str, Any]:
        """64 prompts of 16 to 1,023 tokens and 3 of about 2,500, 32 greedy tokens, top-5 logprobs, in all company."""
        self.generator.manual_seed(2)  # whatever ran before
        lengths = [*torch.randint(16, 1024, (64,), generator=self.generator).tolist(), 2441, 2500, 2561]
        prompts = [self.prompts(1, length)[0] for length in lengths]
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5, seed=0)

        def run(which: list[int]) -> dict[int, Any]:
            results = self.llm.generate([prompts[i] for i in which], params)
            return {i: result.outputs[0] for i, result in zip(which, results, strict=True)}

        everything = list(range(len(prompts)))
        reference = run(everything)
        in_eights = [everything[first : first + 8] for first in range(0, len(prompts), 8)]
        found: dict[str, Any] = {
            "twice": run(everything) == reference,
            "reversed": run(everything[::-1]) == reference,
            "in 8": {i: o for eight in in_eights for i, o in run(eight).items()} == reference,
            "alone": {i: run([i])[i] for i in everything} == reference,
        }
        scored = SamplingParams(max_tokens=0, prompt_logprobs=5, temperature=0.0)
        whole = [prompts[i] + list(reference[i].token_ids) for i in everything]
        found["prompt + output scored"] = all(
            tuple(result.prompt_logprobs or ())[-32:] == reference[i].logprobs
            for i, result in zip(everything, self.llm.generate(whole, scored), strict=True)
        )
        self.llm.reconfigure(enforce_eager=True)
        found["eager"] = run(everything) == reference
        self.llm.reconfigure(enforce_eager=False)
        digest = hashlib.sha256(repr([reference[i] for i in everything]).encode()).hexdigest()[:16]
        print("bits equal:", found, "digest", digest, flush=True)
        return {**found, "digest": digest}


def _synchronize(llm: LLM) -> None:
    if llm.model.plan.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
