"""Tokens per second where routing is skewed: as placed at first, balanced by a permutation, balanced with copies.

    torchrun --nproc-per-node 2 benchmarks/bench_balance.py --output balance_cpu.json
    torchrun --nproc-per-node 2 benchmarks/bench_balance.py --device cuda --output balance_h200_x2.json

The router's rows of the hot experts, which all are on the first rank, are scaled until the hottest expert has
``--peak`` times the mean. Plans are made from the loads of another batch than the ones measured. Per placement: decode
and prefill tokens per second of all ranks (median of the repeats), balancedness under the loads of the measured
batches, and for moves bytes, stall and time. On a GPU: Qwen3-30B-A3B dimensions, dummy bf16 weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from shapes import write_config

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.incremental import plan_incremental
from moe_runtime.eplb.policy import plan_placement
from moe_runtime.launch.distributed import close_ranks, init_ranks
from moe_runtime.layers.decoder import Decoder
from moe_runtime.layers.mlp import MoE

SEARCH_STEPS = 7


def main() -> None:
    """Measure all three and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--layers", type=int, default=48, help="of the model on a GPU")
    parser.add_argument("--peak", type=float, default=3.0, help="hottest expert over mean")
    parser.add_argument("--redundant", type=int, default=16)
    parser.add_argument("--num-seqs", type=int, default=64, help="of each rank")
    parser.add_argument("--tokens", type=int, default=64, help="of each sequence's output")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt of prefill")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    group = init_ranks(options.device)
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "num_ranks": group.size,
        **{name: getattr(options, name) for name in ("num_seqs", "tokens", "prompt", "redundant", "peak")},
        "placements": [],
    }
    gain = 0.0
    with tempfile.TemporaryDirectory() as folder:
        if options.device == "cuda":
            write_config(Path(folder), num_hidden_layers=options.layers)
        for num_redundant in (0, options.redundant):
            bench = _Bench(options, group, Path(folder), num_redundant)
            gain = gain or bench.find_gain()
            bench.scale_router(gain)
            counts = bench.load(seed=1)
            if num_redundant == 0:
                result |= {"router_gain": gain, "hottest_over_mean": float(_peak(counts))}
                result["placements"].append({"name": "as placed at first", **bench.measure()})
            name = "balanced with copies" if num_redundant else "balanced by permutation"
            result["placements"].append({"name": name, **bench.rebalance(counts), **bench.measure()})
            bench.close()
    if group.rank == 0:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result, indent=1))
    close_ranks(group)


class _Bench:
    """One deployment."""

    def __init__(self, options: Any, group: RankGroup, folder: Path, num_redundant: int) -> None:
        self.options = options
        settings: dict[str, Any] = {"device": "cpu"}
        model = "builtin"
        if options.device == "cuda":
            model = str(folder)
            settings = {"device": "cuda", "load_format": "dummy", "max_model_len": 4096, "seed": 1}
        if group.size == 1:
            settings |= {"dispatcher": "loopback", "loopback_ranks": 2}
        self.llm = LLM(
            model,
            group=group,
            num_redundant_experts=num_redundant,
            rearrange_interval=1 << 40,  # moves come from here
            max_num_seqs=options.num_seqs,
            max_num_batched_tokens=max(512, options.num_seqs) if options.device == "cpu" else 8192,
            prefix_cache=False,  # every placement gets the same prompts
            **settings,
        )
        self.vocab_size = self.llm.model.plan.config.vocab_size

    def close(self) -> None:
        self.llm.close()
        del self.llm
        gc.collect()
        if self.options.device == "cuda":
            torch.cuda.empty_cache()

    def find_gain(self) -> float:
        """Factor of the hot rows that makes the hottest expert as hot as asked for; leaves the router as it was."""
        low, high = 1.0, 8.0
        for _ in range(SEARCH_STEPS):
            middle = (low * high) ** 0.5
            self.scale_router(middle)
            is_hot = _peak(self.load(seed=0)) > self.options.peak
            self.scale_router(1 / middle)
            low, high = (low, middle) if is_hot else (middle, high)
        return float((low * high) ** 0.5)

    def scale_router(self, gain: float) -> None:
        """Scale the rows of a quarter of the experts, which are on the first rank."""
        decoder = self.llm.model.decoder
        hot = max(1, self.llm.model.plan.config.num_experts // 4)
        if isinstance(decoder, Decoder):
            for layer in decoder.layers:
                if isinstance(layer.mlp, MoE):
                    tiles = layer.mlp.router.tiles  # experts are columns of tiles
                    for expert in range(hot):
                        tiles[:, expert // tiles.shape[3], :, expert % tiles.shape[3]] *= gain
            return
        for layer in decoder.layers:
            layer.router[:hot] *= gain

    def load(self, seed: int) -> npt.NDArray[np.int64]:
        """``[layers, experts]`` pairs of a batch, of all ranks."""
        before = self._counts()
        self._generate(seed, 64, 8)
        return self._counts() - before

    def rebalance(self, counts: npt.NDArray[np.int64]) -> dict[str, Any]:
        """Move to the plan for these loads, beside a batch that decodes."""
        now = self.llm.placement
        target = plan_placement(counts, now.slots_per_rank)
        near = plan_incremental(counts, now)
        expert_bytes = self.mover.stats().spare_bytes // max(now.slots_per_rank)
        before, start_s = self.mover.stats(), time.perf_counter()
        self.llm.generate(self._prompts(2, 16), self._params(self.options.tokens), moves={0: target})
        after = self.mover.stats()
        assert self.llm.placement == target, "the move has ended"
        num_layers = after.num_layers - before.num_layers
        return {
            "way": "push" if self.mover._transfer.store.pushes else "hosts",
            "layers_moved": num_layers,
            "received_bytes": after.num_bytes - before.num_bytes,
            "full_plan_bytes": near.full_moves.num_bytes(expert_bytes),
            "incremental_plan_bytes": near.moves.num_bytes(expert_bytes),
            "incremental_balancedness": balance_of(counts, near.placement).overall,
            "stall_us_per_layer": (after.stall_s - before.stall_s) / max(1, num_layers) * 1e6,
            "batch_s": time.perf_counter() - start_s,
        }

    @property
    def mover(self) -> Any:
        """The interval asks for one."""
        mover = self.llm.engine.mover
        assert mover is not None, "experts may be moved"
        return mover

    def measure(self) -> dict[str, Any]:
        """Tokens per second now."""
        options, size = self.options, self.llm.num_engines
        num_prefill = max(4, 8192 // options.prompt)
        self._generate(3, 16, options.tokens)  # warm
        self._generate(3, options.prompt, 1, num_prefill)
        before = self._counts()
        decode = [self._generate(4 + i, 16, options.tokens) for i in range(options.repeats)]
        decoded = self._counts()
        prefill = [self._generate(40 + i, options.prompt, 1, num_prefill) for i in range(options.repeats)]
        prefilled = self._counts()
        place = self.llm.placement
        return {
            "decode_tokens_per_s": options.num_seqs * size * options.tokens / statistics.median(decode),
            "prefill_tokens_per_s": num_prefill * size * options.prompt / statistics.median(prefill),
            "decode_balancedness": balance_of(decoded - before, place).overall,
            "prefill_balancedness": balance_of(prefilled - decoded, place).overall,
        }

    def _counts(self) -> npt.NDArray[np.int64]:
        counts = torch.as_tensor(self.llm.engine.runner.expert_load.counts).cpu()  # type: ignore[attr-defined]
        place = self.llm.placement
        total = self.llm.group.all_gather(counts.reshape(-1)).sum(dim=0)
        found: npt.NDArray[np.int64] = total.numpy().reshape(place.num_layers, place.num_logical_experts)
        return found

    def _generate(self, seed: int, prompt: int, num_tokens: int, num_seqs: int | None = None) -> float:
        """Seconds."""
        prompts = self._prompts(seed, prompt, num_seqs)
        self.llm.group.all_gather_bytes(b"")
        start_s = time.perf_counter()
        self.llm.generate(prompts, self._params(num_tokens))
        return time.perf_counter() - start_s

    def _prompts(self, seed: int, length: int, num_seqs: int | None = None) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        count = (num_seqs or self.options.num_seqs) * self.llm.num_engines
        found: list[list[int]] = rng.integers(1, self.vocab_size, (count, length)).tolist()
        return found

    def _params(self, num_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _peak(counts: npt.NDArray[np.int64]) -> float:
    """Hottest expert over the mean, median of the layers."""
    return float(np.median(counts.max(axis=1) / np.maximum(1e-9, counts.mean(axis=1))))


if __name__ == "__main__":
    main()
