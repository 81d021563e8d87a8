"""Dispatch and combine of ranks on GPUs of one host: microseconds a layer inside a CUDA graph, link rates, bits, races.

    torchrun --nproc-per-node 2 benchmarks/bench_dispatch.py --commit X --output benchmarks/results/dispatch_h200.json

By default dimensions of Qwen3-30B-A3B (hidden 2048, 128 experts, top-8), bf16, routing at random. A layer is the
product's own calls around an identity expert (``dispatch_chain.py``); a graph holds ``NUM_LAYERS`` of them
(``NUM_LAYERS_LARGE`` from ``LARGE_TOKENS`` on) and counts the step itself. Times are medians over replays, the slowest
rank's, and bytes are those that leave a rank; the floor is bytes over ``LINK_GBPS``. ``--parts``:

``layers``, per number of tokens:

* ``us``: whole layers, and ``gbps``, bytes over it; ``dispatch_us`` and ``rows_us`` the halves (to the end of the first
  wait, and from there on);
* ``no_peer_us``: the same kernels without flags, the peer's memory being local; ``exposed_us`` is the difference;
* ``presum_us``: as ``--invariance batch`` has it: a rank keeps its slots' rows, adds them in a kernel of its own and
  sends one row per token of the other (other bits, checked by themselves);
* ``slots_each_us``: by slots that a program of the identity expert works through; the best one is used for the rest;
* rows of the kind ``prefill``: the link's rate in both directions at once with one barrier per transfer.

``race``: the replays with wrong rows under pauses between waits and reads, also with the waits in kernels of their own
(``apart``), and the control without waits. ``collective``: the engine's other exchange, and NCCL's two all-to-alls of
rows alone.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from dispatch_chain import DispatchChain, LayerRows, bytes_out, first_experts
from dispatch_race import RaceCase, race
from rank_timing import Ranks

from moe_runtime.comm.collective_exchange import CollectiveExchange
from moe_runtime.comm.gpu_exchange import MAX_FIXED_ROWS, ExchangeSizes, StepShape, SymmetricExchange
from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.kernels.dispatch_triton import dispatch_rows_reference

LINK_GBPS = 365.0
"""One direction of NVLink as SM stores reach it on two H200; nominally 450."""
PARTS = ("layers", "race", "collective")
TOKENS = (1, 8, 32, 128, 512, 4096)
PREFILL_TOKENS = 4096
NUM_LAYERS, NUM_LAYERS_LARGE, LARGE_TOKENS = 48, 8, 512
SLOTS_EACH, SLOTS_EACH_LARGE = (1, 2, 8), (4, 8)
RACE_TOKENS, RACE_REPLAYS, CONTROL_REPLAYS = (8, 32), 200, 20
GOALS_US = {1: (9.0, 6.5), 128: (17.0, 14.0)}
"""By tokens per rank: must, aim; of two ranks and the default shape."""
GOALS_GBPS = (330.0, 350.0)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Dimensions of a layer: H, the experts of all ranks, and K."""

    hidden: int = 2048
    num_experts: int = 128
    num_topk: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.num_topk <= self.num_experts:
            raise ValueError(f"num_topk ({self.num_topk}) must be in [1, {self.num_experts}], the experts")


class Case:
    """Ranks with ``num_tokens`` each: sizes, the inputs of all ranks, this rank's chain over symmetric memory."""

    def __init__(self, ranks: Ranks, num_tokens: int, dimensions: Shape) -> None:
        self.ranks, self.num_tokens = ranks, num_tokens
        size, rank = ranks.group.size, ranks.group.rank
        self.num_layers = NUM_LAYERS if num_tokens < LARGE_TOKENS else NUM_LAYERS_LARGE
        self.sizes = exchange_sizes(dimensions, size, num_tokens, self.num_layers)
        self.shape = StepShape.of_bucket(num_tokens, size)
        self.first_expert = first_experts(dimensions.num_experts, size)
        experts = range(dimensions.num_experts)
        self.rows = [
            LayerRows.draw(self.sizes, num_tokens, experts, num_tokens * size + peer, ranks.device)
            for peer in range(size)
        ]
        self.own = self.rows[rank]

    def chain(
        self, exchange: SymmetricExchange | CollectiveExchange, rank: int, **form: Any
    ) -> DispatchChain:
        """Layers of a rank, with its inputs in their places."""
        chain = DispatchChain(exchange, self.sizes, self.shape, self.rows[rank], self.first_expert, **form)
        chain.fill()
        return chain

    def connected(self) -> DispatchChain:
        """This rank's, over memory that peers write."""
        space = SymmetricSpace.connect(self.ranks.group, self.sizes.symmetric_bytes, self.ranks.device)
        exchange = SymmetricExchange(space, self.sizes, self.first_expert)
        exchange.connect()
        return self.chain(exchange, self.ranks.group.rank, pdl=True)

    def presummed(self) -> Case:
        """The same, with ranks that add their slots."""
        other = copy.copy(self)
        other.sizes = replace(self.sizes, presums=True)
        return other

    def bytes_out(self, *, presum: bool = False) -> list[tuple[int, int]]:
        """By rank: with dispatch, and with the rows home."""
        ranks = range(self.ranks.group.size)
        return [bytes_out(self.rows, self.first_expert, rank, presum=presum) for rank in ranks]

    def timed(
        self, launch: Callable[[], None], poison: Callable[[], None], is_right: Callable[[], bool]
    ) -> tuple[float, bool]:
        """Microseconds a layer, and whether a replay over poisoned memory is right on every rank."""
        graph = self.ranks.captured(launch)
        us = self.ranks.replay_us(graph, self.num_layers)
        self.ranks.meet()
        poison()
        self.ranks.replay(graph)
        return us, self.ranks.largest(float(not is_right())) == 0.0


def exchange_sizes(dimensions: Shape, size: int, num_tokens: int, num_layers: int) -> ExchangeSizes:
    """Of such layers."""
    return ExchangeSizes(
        size=size, max_rows=num_tokens, hidden=dimensions.hidden, num_topk=dimensions.num_topk,
        num_layers=num_layers, dtype=torch.bfloat16,
    )  # fmt: skip


def poison_table(chain: DispatchChain) -> None:
    """Rows of peers that are not theirs; own ones stay."""
    assert isinstance(chain.exchange, SymmetricExchange), "the collective has no table to write to"
    table = chain.exchange.table(chain.shape)
    table.x.zero_()  # as the reference has it where nothing is sent
    table.ids.fill_(chain.first_expert[-1])
    table.weights.fill_(float("nan"))
    chain.fill()


def poison_homes(chain: DispatchChain) -> None:
    """No row has come home, and there are no outputs."""
    chain.exchange.collect(chain.shape)[0].fill_(float("nan"))
    chain.poison()


def poison_all(chain: DispatchChain) -> None:
    """Nothing but the own inputs is there."""
    poison_table(chain)
    poison_homes(chain)


def table_is_right(case: Case, chain: DispatchChain) -> bool:
    """Whether this rank's table is the reference's."""
    assert isinstance(chain.exchange, SymmetricExchange), "the collective's table is its own"
    table, rows = chain.exchange.table(case.shape), [(r.x[0], r.ids[0], r.weights[0]) for r in case.rows]
    expected = dispatch_rows_reference(rows, case.num_tokens, case.first_expert, chain.exchange.rank)
    return all(map(torch.equal, (table.x, table.ids, table.weights), expected))


def homes_are_right(chain: DispatchChain) -> bool:
    """Whether all rows have come home."""
    return torch.equal(chain.homes(), chain.expected_homes()[0])


def measure_layers(ranks: Ranks, num_tokens: int, dimensions: Shape) -> list[Row]:
    """Whole layers and halves; at the largest number of tokens, the link's rates too."""
    case = Case(ranks, num_tokens, dimensions)
    chain = case.connected()
    bits: dict[str, bool] = {}
    halves_us: dict[str, float] = {}

    def outputs_are_right() -> bool:
        return not chain.wrong_layers()

    slots_us: dict[int, float] = {}
    for slots_each in SLOTS_EACH if num_tokens < LARGE_TOKENS else SLOTS_EACH_LARGE:
        if dimensions.num_topk % slots_each:
            continue
        chain.slots_each = slots_each
        slots_us[slots_each], bits[f"layer, {slots_each} slots"] = case.timed(
            chain.launch, lambda: poison_all(chain), outputs_are_right
        )
    chain.slots_each = min(slots_us, key=lambda slots_each: slots_us[slots_each])
    halves_us["dispatch"], bits["dispatch"] = case.timed(
        lambda: chain.launch_parts(chain.dispatch, chain.await_rows),
        lambda: poison_table(chain),
        lambda: table_is_right(case, chain),
    )
    halves_us["rows"], bits["rows"] = case.timed(
        lambda: chain.launch_parts(chain.run_experts, chain.combine),
        lambda: poison_homes(chain),
        outputs_are_right,
    )
    prefill: list[Row] = []
    if num_tokens == PREFILL_TOKENS:
        halves_us["rows and barrier"], bits["rows and barrier"] = case.timed(
            lambda: chain.launch_parts(chain.run_experts, chain.await_homes),
            lambda: poison_homes(chain),
            lambda: homes_are_right(chain),
        )
        prefill = prefill_rows(case, halves_us, bits)
    no_peer_us, bits["no peer"] = without_peer(case, chain.slots_each)
    presummed = case.presummed().connected()
    presummed.slots_each = chain.slots_each
    presum_us, bits["presum"] = case.timed(
        presummed.launch, lambda: poison_all(presummed), lambda: not presummed.wrong_layers()
    )
    num_bytes, presum_bytes = max(map(sum, case.bytes_out())), max(map(sum, case.bytes_out(presum=True)))
    us, floor_us = min(slots_us.values()), num_bytes / (LINK_GBPS * 1e3)
    has_goals = ranks.group.size == 2 and dimensions == Shape()
    must_us, aim_us = GOALS_US.get(num_tokens, (None, None)) if has_goals else (None, None)
    row: Row = {
        "kind": "layer",
        "tokens_per_rank": num_tokens,
        "layers": case.num_layers,
        "us": round(us, 2),
        "gbps": round(num_bytes / (us * 1e3), 1),
        "must_us": must_us,
        "aim_us": aim_us,
        "floor_us": round(floor_us, 2),
        "floor_fraction": round(floor_us / us, 3),
        "no_peer_us": round(no_peer_us, 2),
        "exposed_us": round(us - no_peer_us, 2),
        "dispatch_us": round(halves_us["dispatch"], 2),
        "rows_us": round(halves_us["rows"], 2),
        "slots_each": chain.slots_each,
        "slots_each_us": {str(slots_each): round(value, 2) for slots_each, value in slots_us.items()},
        "presum_us": round(presum_us, 2),
        "presum_floor_us": round(presum_bytes / (LINK_GBPS * 1e3), 2),
        "bytes_out": num_bytes,
        "presum_bytes_out": presum_bytes,
        "bits": bits_text(bits),
    }
    ranks.meet()  # a rank that left would take its memory along
    return [row, *prefill]


def prefill_rows(case: Case, halves_us: dict[str, float], bits: dict[str, bool]) -> list[Row]:
    """Rates of both transfers."""
    rows: list[Row] = []
    for i, name in enumerate(("dispatch", "rows and barrier")):
        num_bytes = min(by_rank[i] for by_rank in case.bytes_out())
        rows.append(
            {
                "kind": "prefill",
                "transfer": name if i else "dispatch and barrier",
                "tokens_per_rank": case.num_tokens,
                "us": round(halves_us[name], 2),
                "bytes_out": num_bytes,
                "gbps": round(num_bytes / (halves_us[name] * 1e3), 1),
                "must_gbps": GOALS_GBPS[0],
                "aim_gbps": GOALS_GBPS[1],
                "bits": bits_text({name: bits[name]}),
            }
        )
    return rows


def without_peer(case: Case, slots_each: int) -> tuple[float, bool]:
    """A rank's layers whose peers' memory is its own GPU's, where all they would send lies already."""
    device, rank, size = case.ranks.device, case.ranks.group.rank, case.ranks.group.size
    chains = []
    for space in SymmetricSpace.virtual(size, case.sizes.symmetric_bytes, device):
        exchange = SymmetricExchange(space, case.sizes, case.first_expert, waits=False)
        chains.append(case.chain(exchange, space.rank, slots_each=slots_each, pdl=True))
    for part in ("dispatch", "await_rows", "run_experts"):
        for chain in chains:
            getattr(chain, part)(0)
    own = chains[rank]
    return case.timed(own.launch, own.poison, lambda: not own.wrong_layers())


def measure_race(ranks: Ranks, num_tokens: int, dimensions: Shape, *, apart: bool, waits: bool) -> Row:
    """Replays with wrong rows, of all ranks."""
    case = RaceCase(
        sizes=exchange_sizes(dimensions, ranks.group.size, num_tokens, NUM_LAYERS),
        num_experts=dimensions.num_experts,
        live_tokens=(num_tokens,) * ranks.group.size,
        apart=apart,
        waits=waits,
        num_replays=RACE_REPLAYS if waits else CONTROL_REPLAYS,
    )
    wrong = ranks.group.all_gather(torch.tensor([race(case, ranks.group, ranks.device, ranks.captured)]))
    return {
        "kind": "race" if waits else "race, control without waits",
        "tokens_per_rank": num_tokens,
        "layers": NUM_LAYERS,
        "waits_and_reads_apart": apart,
        "replays_of_all_ranks": case.num_replays * ranks.group.size,
        "wrong": int(wrong.sum()),
        "as_expected": bool(wrong.sum() == 0) if waits else bool(wrong.sum() > 0),
    }


def measure_collective(ranks: Ranks, num_tokens: int, dimensions: Shape) -> Row:
    """The engine's other exchange, in a graph as far as there are graphs of so many rows, and NCCL alone in one.

    NCCL's pair sends every rank all rows, and home as many rows from each as make K of every token.
    """
    case = Case(ranks, num_tokens, dimensions)
    size, num_topk = ranks.group.size, dimensions.num_topk
    row: Row = {"kind": "collective", "tokens_per_rank": num_tokens, "layers": case.num_layers}
    x = torch.zeros(size * num_tokens, dimensions.hidden, dtype=torch.bfloat16, device=ranks.device)
    num_home = -(-num_tokens * num_topk // size) * size
    rows = torch.zeros(num_home, dimensions.hidden, dtype=torch.bfloat16, device=ranks.device)
    x_out, rows_out = torch.empty_like(x), torch.empty_like(rows)

    def pairs() -> None:
        for _ in range(case.num_layers):
            dist.all_to_all_single(x_out, x)
            dist.all_to_all_single(rows_out, rows)

    nccl_us = ranks.graph_us(pairs, case.num_layers)
    row["nccl_pair_us"] = round(nccl_us, 2)
    row["nccl_pair_gbps"] = round((size - 1) / size * (x.nbytes + rows.nbytes) / (nccl_us * 1e3), 1)
    exchange = CollectiveExchange(ranks.group, case.sizes, case.first_expert, ranks.device)
    exchange.connect()
    if num_tokens > MAX_FIXED_ROWS:
        case.shape = StepShape.of_tokens(case.shape.tokens_per_rank)
    chain = case.chain(exchange, ranks.group.rank, slots_each=num_topk)
    if num_tokens <= MAX_FIXED_ROWS:
        us, equal = case.timed(chain.launch, chain.poison, lambda: not chain.wrong_layers())
    else:
        row["form"] = "exact sizes, no graph"
        us = ranks.launch_us(chain.launch, case.num_layers)
        equal = ranks.largest(float(bool(chain.wrong_layers()))) == 0.0
    return row | {"us": round(us, 2), "bits": bits_text({"layer": equal})}


def bits_text(bits: dict[str, bool]) -> str:
    """What was wrong, if anything."""
    wrong = [name for name, equal in bits.items() if not equal]
    return f"bits DIFFER: {', '.join(wrong)}" if wrong else "bits equal"


class Report:
    """Rows so far; rank 0 prints and writes them."""

    def __init__(self, ranks: Ranks, options: argparse.Namespace) -> None:
        self.ranks, self.options = ranks, options
        self.start_s = time.monotonic()
        self.rows: list[Row] = []

    def has_time(self, what: str) -> bool:
        """Whether all ranks are within the budget; says what is left out otherwise."""
        if self.ranks.largest(time.monotonic() - self.start_s) <= self.options.budget_s:
            return True
        self.add([{"kind": "left out", "what": what}])
        return False

    def add(self, rows: Sequence[Row]) -> None:
        """Print and write."""
        self.rows += rows
        if self.ranks.group.rank:
            return
        for row in rows:
            print(f"[{time.monotonic() - self.start_s:.0f} s] {json.dumps(row)}", flush=True)
        if self.options.output is not None:
            content = {
                "device": torch.cuda.get_device_name(),
                "ranks": self.ranks.group.size,
                "torch": torch.__version__,
                "triton": triton.__version__,
                "commit": self.options.commit,
                "shapes": {
                    "hidden": self.options.hidden,
                    "experts": self.options.experts,
                    "topk": self.options.topk,
                    "dtype": "bfloat16",
                },
                "link_gbps": LINK_GBPS,
                "results": self.rows,
            }
            self.options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")

    def table(self) -> str:
        """All rows to be read."""
        names = ("us", "must_us", "aim_us", "floor_us", "floor_fraction", "no_peer_us", "exposed_us")
        names += ("dispatch_us", "rows_us", "presum_us", "slots_each")
        lines = [" ".join(f"{name:>15}" for name in ("tokens_per_rank", *names))]
        for row in self.rows:
            if row["kind"] == "layer":
                cells = ["-" if row[name] is None else str(row[name]) for name in ("tokens_per_rank", *names)]
                lines.append(" ".join(f"{cell:>15}" for cell in cells) + f"  {row['bits']}")
        for row in self.rows:
            if row["kind"] != "layer":
                lines.append(", ".join(f"{name} {value}" for name, value in row.items()))
        return "\n".join(lines)


def measure_all(ranks: Ranks, report: Report, options: argparse.Namespace) -> None:
    """Everything that was asked for and that the budget has room for."""
    dimensions = Shape(hidden=options.hidden, num_experts=options.experts, num_topk=options.topk)
    for num_tokens in options.tokens if "layers" in options.parts else ():
        if report.has_time(f"layers of {num_tokens}"):
            report.add(measure_layers(ranks, num_tokens, dimensions))
    for num_tokens in RACE_TOKENS if "race" in options.parts else ():
        for apart, waits in ((False, True), (True, True), (False, False)):
            if report.has_time(f"race at {num_tokens}, apart {apart}, waits {waits}"):
                report.add([measure_race(ranks, num_tokens, dimensions, apart=apart, waits=waits)])
    for num_tokens in options.tokens if "collective" in options.parts else ():
        if report.has_time(f"collective at {num_tokens}"):
            try:
                report.add([measure_collective(ranks, num_tokens, dimensions)])
            except RuntimeError as error:  # NCCL refuses to be captured: on all ranks alike
                report.add([{"kind": "collective", "tokens_per_rank": num_tokens, "error": str(error)[:300]}])
                break


def parse_options(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", default="", help="recorded with the results")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="per rank")
    parser.add_argument("--hidden", type=int, default=Shape().hidden)
    parser.add_argument("--experts", type=int, default=Shape().num_experts)
    parser.add_argument("--topk", type=int, default=Shape().num_topk)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--budget-s", type=float, default=75.0, help="nothing more is begun after so long")
    parser.add_argument(
        "--limit-s", type=float, default=150.0, help="a rank that still waits then ends itself"
    )
    return parser.parse_args(args)


def main() -> None:
    """Measure; rank 0 prints and writes."""
    options = parse_options()
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    ranks = Ranks()
    report = Report(ranks, options)
    measure_all(ranks, report, options)
    if ranks.group.rank == 0:
        print(report.table(), flush=True)
    ranks.meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
