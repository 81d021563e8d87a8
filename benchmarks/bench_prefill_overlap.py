"""Does it pay to run prefill's exchange of one micro-batch beside the compute of another? Two H200, sustained loops.

    torchrun --nproc-per-node 2 benchmarks/bench_prefill_overlap.py --commit X --output overlap_h200.json

It would pay if ``pipeline`` took at least 5 % less time than ``serial`` at 4,096 tokens of a rank and micro-batch, by
some way of sending: a ``ratio`` of 0.95 or less. Below that, two sets of buffers and half as many launches again buy
nothing. ``beside`` bounds what any order of launches could reach: if it stays above 0.95, the answer is no. ``serial``
must be about 1,370 us there, the engine's layer (docs/benchmarks.md); else something here is not what the engine does.

Layers have Qwen3-30B-A3B's dimensions, random bf16 weights and routing by a random router, and run the engine's kernels
by its schedules (overlap_layer.py), sequences of 2,048 tokens, without the embedding and the head. A graph holds
``NUM_LAYERS`` layers over two sets of weights. Plans (overlap_plans.py, which says why no two streams wait for each
other in a circle):

* ``serial`` is today's engine: one stream, rows go home from the epilogue of the experts' last GEMM;
* ``apart``: the same with a kernel of its own that sends them;
* ``compute`` and ``exchange``: a layer's two halves alone; ``exchange`` with GB/s of what leaves a rank;
* ``beside``: both at once, on two streams that do not wait for each other, independent buffers;
* ``pipeline``: two micro-batches, each one's exchange beside the other's compute, with all waits of a real step;
* ``two_streams``: today's kernels, each micro-batch on its own stream.

``programs``: how a micro-batch's rows travel. ``engine``: its dispatch, and a program for every few rows home; a
number: so many looping programs of 16 warps, on as many multiprocessors at most; ``copies``: by copy engines, which
take none, and send all K rows of a token home, twice the bytes. ``spare``: multiprocessors that the experts' GEMMs
leave to the exchange; a GPU at its power limit may lose less by it than their share. ``priority``: the stream that goes
first.

Times are microseconds a layer of one micro-batch (of ``beside``: one compute and one exchange), of the slowest rank,
over the second half of a loop of ``--loop-s`` seconds; the first half is ``first_us``. A GPU in prefill is at its power
limit: SM clock, power and the share of samples under the limit are this second half's, rank by rank. ``ratio`` is to
``serial`` at the same number of tokens. Every plan's results are compared with the serial plan's bit for bit, after its
buffers have been poisoned.

``--device cpu`` plays all plans on ranks whose entries end in random order, and ends with 1 if one is stuck.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from gpu_gauges import GpuGauges, summary
from identity_experts import stop_between
from overlap_layer import LayerStack, MicroBatch
from overlap_plans import PLANS, Entry, calls_of, stuck
from rank_timing import Ranks
from shapes import QWEN3_30B_A3B

from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.models.qwen3_moe import parse_config

NUM_LAYERS, NUM_WEIGHTS = 4, 2
SEQ_LEN = 2048
TOKENS = (4096, 2048, 8192)
"""Of a rank and micro-batch; all settings are measured at the first one."""
LOOP_S, EXCHANGE_LOOP_S = 2.0, 0.5
"""The exchange alone is far from the power limit, so that a shorter loop will do."""
PAYS = 0.95
PROGRAMS: tuple[int | None, ...] = (None, 8, 16, 32, 64)
SPARE_ALONE = 32
"""Of a second ``compute``: what such a number costs by itself."""
NUM_PIPELINES = 2
SELF_CHECK_SEEDS = 200

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a micro-batch's exchange runs.

    Attributes:
        programs, spare: As of ``MicroBatch``.
        priority: Lane that goes first, or ``none``.
    """

    programs: int | None = None
    spare: int = 0
    priority: str = "none"

    @property
    def label(self) -> Row:
        """For a row."""
        names = {None: "engine", 0: "copies"}
        programs = names.get(self.programs, str(self.programs))
        return {"programs": programs, "spare": self.spare, "priority": self.priority}


SETTINGS = (
    Setting(priority="exchange"),
    Setting(priority="compute"),
    Setting(programs=8, spare=8, priority="exchange"),
    Setting(programs=16, priority="exchange"),
    Setting(programs=16, spare=16, priority="exchange"),
    Setting(programs=16, spare=16, priority="compute"),
    Setting(programs=32, spare=32, priority="exchange"),
    Setting(programs=64, spare=64, priority="exchange"),
)
"""Of ``beside``; priorities both ways where they may matter."""
COPIES = Setting(programs=0, spare=4, priority="exchange")
"""Places for the waits alone; measured last, as only these are captured copies into another GPU's memory."""
TWO_STREAMS = Setting(spare=2)
"""A place for each stream's wait."""


class Bench:
    """One number of tokens: two micro-batches of this rank, and what the serial plan makes of them."""

    def __init__(self, ranks: Ranks, stack: LayerStack, num_tokens: int, options: argparse.Namespace) -> None:
        self.ranks, self.num_tokens, self.options = ranks, num_tokens, options
        size, rank = ranks.group.size, ranks.group.rank
        sizes = MicroBatch.sizes_of(stack.config, size, num_tokens, NUM_LAYERS)
        self.batches = []
        for i in range(2):
            space = SymmetricSpace.connect(ranks.group, MicroBatch.region_bytes(sizes), ranks.device)
            seq_len = min(SEQ_LEN, num_tokens)
            seed = 1000 * num_tokens + 10 * rank + i
            batch = MicroBatch(stack, space, sizes, num_tokens // seq_len, seq_len, seed)
            batch.exchange.connect()
            self.batches.append(batch)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=ranks.device)
        stream: Any = torch.cuda.Stream
        self._usual, self._other, self._first = stream(), stream(), stream(priority=-1)
        self._run_once("serial", Setting())
        self.expected = [batch.outputs() for batch in self.batches]
        self.serial_us = math.nan

    def measure(self, plan: str, setting: Setting, gauges: GpuGauges) -> Row:
        """A row: bits first, then the loop."""
        self._run_once("apart", setting)  # tables, and rows that wait to be sent, on the setting's way
        before = [batch.received() for batch in self.batches]
        num_bytes = self.ranks.largest(self.batches[0].bytes_out())
        rows = self.batches[1].home_rows().clone()
        self._run_once("compute", setting)
        alone = self.batches[1].outputs()
        graph = self.ranks.captured(lambda: self._launch(plan, setting))
        self.batches[1].home_rows().copy_(rows)
        is_right = self._is_right(plan, graph, before, alone)
        del rows, before
        loop_s = min(self.options.loop_s, EXCHANGE_LOOP_S) if plan == "exchange" else self.options.loop_s
        calls = calls_of(plan, NUM_LAYERS)
        first_us, us, sample = self._sustained(graph, calls, loop_s, gauges)
        if plan == "serial":
            self.serial_us = us
        row: Row = {"tokens_per_rank": self.num_tokens, "plan": plan, **setting.label, "us": round(us, 1)}
        row["ratio"] = None if math.isnan(self.serial_us) else round(us / self.serial_us, 4)
        row["first_us"] = round(first_us, 1)
        if plan == "exchange":
            row |= {"bytes_out": int(num_bytes), "gbps": round(num_bytes / (us * 1e3), 1)}
        row["ranks"] = [json.loads(data) for data in self.ranks.group.all_gather_bytes(sample)]
        return row | {"bits": "bits equal" if is_right else "bits DIFFER"}

    def compile(self) -> None:
        """Run every way once."""
        for programs in PROGRAMS:
            self._run_once("apart", Setting(programs=programs))

    def shares(self) -> list[float]:
        """By rank, pairs of its experts as a multiple of an even share."""
        data = json.dumps(self.batches[0].share()).encode()
        return [round(json.loads(other), 4) for other in self.ranks.group.all_gather_bytes(data)]

    def _launch(self, plan: str, setting: Setting) -> None:
        """A step on the current stream, which all lanes leave and come back to."""
        main: Any = torch.cuda.current_stream()
        entries = PLANS[plan](NUM_LAYERS)
        for i, batch in enumerate(self.batches):
            batch.programs, batch.spare = setting.programs, setting.spare
            batch.begin(entries, i)
        used = [lane for lane in ("compute", "exchange") if any(e.lane == lane for e in entries)]
        streams = {lane: self._first if lane == setting.priority else self._usual for lane in used}
        if len(used) == 2 and len({id(stream) for stream in streams.values()}) == 1:
            streams["exchange"] = self._other
        start = main.record_event()
        for stream in streams.values():
            stream.wait_event(start)
        self._launch_entries(entries, streams)
        for stream in streams.values():
            main.wait_event(stream.record_event())

    def _launch_entries(self, entries: Sequence[Entry], streams: dict[str, Any]) -> None:
        needed = {i for entry in entries for i in entry.after}
        events: dict[int, Any] = {}
        # What comes next in a lane is not to be dependent on the kernel before.
        plain = dict.fromkeys(streams, True)
        for i, entry in enumerate(entries):
            stream, batch = streams[entry.lane], self.batches[entry.batch]
            with torch.cuda.stream(stream):
                for j in entry.after:
                    stream.wait_event(events[j])
                if plain[entry.lane] or entry.after:
                    stop_between(self._nothing)
                waits = entry.part in ("await_table", "await_homes")
                # A wait is one warp beside another lane; and a copy is no kernel that a launch can depend on.
                is_plain = waits and (len(streams) > 1 or batch.programs == 0)
                batch.run(entry, pdl=self.options.pdl and not is_plain)
                plain[entry.lane] = waits and len(streams) > 1
                if i in needed:
                    events[i] = stream.record_event()

    def _run_once(self, plan: str, setting: Setting) -> None:
        """Without a graph; compiles what has not been compiled."""
        self.ranks.meet()
        with torch.cuda.stream(self.ranks.stream):
            self._launch(plan, setting)
        self.ranks.meet()

    def _is_right(
        self,
        plan: str,
        graph: torch.cuda.CUDAGraph,
        before: Sequence[Sequence[torch.Tensor]],
        alone: Sequence[torch.Tensor],
    ) -> bool:
        """Whether a replay over poison leaves, on every rank, what the serial plan leaves.

        Args:
            plan, graph: Which, and of it.
            before: What each micro-batch had received before, and must receive again.
            alone: Outputs of ``compute`` without a graph and without the other micro-batch, from the same rows.
        """
        poisoned = {"compute": (), "exchange": (0,), "beside": (0,)}.get(plan, (0, 1))
        for i in poisoned:
            self.batches[i].poison()
        self.batches[1].poison_outputs()
        self.ranks.replay(graph)
        pairs: list[tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]] = []
        if plan in ("exchange", "beside"):
            pairs.append((self.batches[0].received(), before[0]))
        if plan in ("compute", "beside"):
            pairs.append((self.batches[1].outputs(), alone))
        if len(poisoned) == 2:
            pairs += [
                (batch.outputs(), want) for batch, want in zip(self.batches, self.expected, strict=True)
            ]
        same = all(torch.equal(a, b) for found, want in pairs for a, b in zip(found, want, strict=True))
        return self.ranks.largest(float(not same)) == 0.0

    def _sustained(
        self, graph: torch.cuda.CUDAGraph, calls: int, loop_s: float, gauges: GpuGauges
    ) -> tuple[float, float, bytes]:
        """Microseconds a call of both halves of a loop, the slowest rank's, and this rank's gauges in the second."""
        replay_us = self.ranks.replay_us(graph, 1)
        half = max(1, math.ceil(loop_s * 1e6 / replay_us / 2))  # the same on every rank
        event = partial(torch.cuda.Event, enable_timing=True)
        start, middle, end = event(), event(), event()
        self.ranks.meet()
        with torch.cuda.stream(self.ranks.stream):
            start.record()
            for _ in range(half):
                graph.replay()
            middle.record()
            for _ in range(half):
                graph.replay()
            end.record()
        middle.synchronize()
        middle_s = time.monotonic()
        end.synchronize()
        sample = json.dumps(summary(gauges.between(middle_s, time.monotonic()))).encode()
        first_us, us = (1e3 * a.elapsed_time(b) / half for a, b in ((start, middle), (middle, end)))
        return self.ranks.largest(first_us) / calls, self.ranks.largest(us) / calls, sample


class Report:
    """Rows so far; rank 0 prints and writes them."""

    def __init__(self, ranks: Ranks, options: argparse.Namespace, gauges: GpuGauges) -> None:
        self.ranks, self.options, self.gauges = ranks, options, gauges
        self.start_s = time.monotonic()
        self.rows: list[Row] = []

    def has_time(self, what: str) -> bool:
        """Whether all ranks are within the budget; says what is left out otherwise."""
        if self.ranks.largest(time.monotonic() - self.start_s) <= self.options.budget_s:
            return True
        self.add({"left_out": what})
        return False

    def add(self, row: Row) -> None:
        """Print and write."""
        self.rows.append(row)
        if self.ranks.group.rank:
            return
        print(f"[{time.monotonic() - self.start_s:.0f} s] {json.dumps(row)}", flush=True)
        if self.options.output is not None:
            content = {
                "device": torch.cuda.get_device_name(),
                "ranks": self.ranks.group.size,
                "torch": torch.__version__,
                "triton": triton.__version__,
                "commit": self.options.commit,
                "dependent_launch": self.options.pdl,
                "gauges": self.gauges.fault or "NVML",
                "results": self.rows,
            }
            self.options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")

    def fastest(self, num_tokens: int, plan: str) -> list[Row]:
        """Rows of a plan, fastest first; the same on every rank."""
        found = [r for r in self.rows if r.get("plan") == plan and r["tokens_per_rank"] == num_tokens]
        return sorted(found, key=lambda row: float(row["us"]))

    def verdict(self) -> str:
        """The answer, as the module says what would be one."""
        lines = []
        for num_tokens in self.options.tokens:
            for plan in ("pipeline", "two_streams", "beside"):
                for row in self.fastest(num_tokens, plan)[:1]:
                    pays = "pays" if (row["ratio"] or 1.0) <= PAYS else "does not pay"
                    way = f"{row['programs']}, spare {row['spare']}, first {row['priority']}"
                    lines.append(f"{num_tokens} tokens, {plan} ({way}): ratio {row['ratio']}: {pays}")
        return "\n".join([*lines, f"{len(self.wrong())} of {len(self.rows)} rows with wrong bits"])

    def wrong(self) -> list[Row]:
        """Rows whose results were not the serial plan's."""
        return [row for row in self.rows if row.get("bits") == "bits DIFFER"]


def measure_all(ranks: Ranks, report: Report, options: argparse.Namespace) -> None:
    """Everything at the first number of tokens; at others the best settings of it."""
    config = parse_config(QWEN3_30B_A3B, None)
    stack = LayerStack.draw(config, NUM_WEIGHTS, ranks.group.rank, ranks.group.size, ranks.device)
    best: list[Setting] = []
    for place, num_tokens in enumerate(options.tokens):
        if not report.has_time(f"{num_tokens} tokens"):
            continue
        bench = Bench(ranks, stack, num_tokens, options)
        if place == 0:
            bench.compile()
            report.start_s = time.monotonic()
        report.add({"tokens_per_rank": num_tokens, "share_of_pairs": bench.shares()})

        def add(plan: str, *settings: Setting, bench: Bench = bench) -> None:
            for setting in settings:
                if report.has_time(f"{bench.num_tokens} tokens, {plan}, {setting.label}"):
                    report.add(bench.measure(plan, setting, report.gauges))

        add("serial", Setting())
        if place == 0:
            add("compute", Setting(), Setting(spare=SPARE_ALONE))
            add("exchange", *(Setting(programs=programs) for programs in PROGRAMS))
            add("beside", *SETTINGS)
            add("pipeline", *settings_of(report.fastest(num_tokens, "beside"))[:NUM_PIPELINES])
            add("two_streams", TWO_STREAMS)
            add("apart", Setting())
            for plan in ("exchange", "beside", "pipeline"):
                add(plan, COPIES)
            best = settings_of(report.fastest(num_tokens, "pipeline"))[:1]
        else:
            add("beside", *best)
            add("pipeline", *best)
        ranks.meet()  # a rank that left would take its memory along
        del bench, add


def settings_of(rows: Sequence[Row]) -> list[Setting]:
    """Of rows of ``beside`` or ``pipeline``."""
    known = (*SETTINGS, COPIES)
    return [next(s for s in known if s.label.items() <= row.items()) for row in rows]


def self_check() -> int:
    """Plans on ranks that end their entries in random order; 1 if one is stuck."""
    wrong = 0
    for name, plan in PLANS.items():
        for size in (2, 4):
            waits = [s for s in range(SELF_CHECK_SEEDS) if stuck(plan(3), size, s)]
            wrong += len(waits)
            print(f"{name:12} {size} ranks: {len(waits)} of {SELF_CHECK_SEEDS} orders are stuck")
    return int(wrong > 0)


def parse_options(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="", help="recorded with the results")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=list(TOKENS), help="per rank and micro-batch"
    )
    parser.add_argument("--loop-s", type=float, default=LOOP_S)
    parser.add_argument("--no-pdl", dest="pdl", action="store_false", help="no dependent launch, in any plan")
    parser.add_argument(
        "--budget-s", type=float, default=60.0, help="nothing more is begun so long after all is compiled"
    )
    parser.add_argument(
        "--limit-s", type=float, default=300.0, help="a rank that still waits then ends itself"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(args)


def main() -> int:
    """Measure; rank 0 prints and writes."""
    options = parse_options()
    if options.device == "cpu":
        return self_check()
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    os.environ["CUDA_GRAPHS_USE_NODE_PRIORITY"] = "1"  # a graph's kernels keep the priority of their lanes
    ranks = Ranks()
    gauges = GpuGauges(f"GPU-{torch.cuda.get_device_properties(ranks.device).uuid}")
    report = Report(ranks, options, gauges)
    measure_all(ranks, report, options)
    if ranks.group.rank == 0:
        print(report.verdict(), flush=True)
    gauges.close()
    ranks.meet()
    dist.destroy_process_group()
    return int(bool(report.wrong()))


if __name__ == "__main__":
    raise SystemExit(main())
