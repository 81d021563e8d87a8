"""Dispatch and combine of CPU ranks, and the all-reduce with the tree, beside gloo's own: microseconds and bits.

    torchrun --nproc-per-node 8 benchmarks/bench_dispatch_cpu.py --output benchmarks/results/dispatch_cpu.json

The small form of ``bench_dispatch.py`` and ``bench_all_reduce.py``, with rows of the same names. A layer is the
product's dispatch and combine around experts that only weight a row, by shared memory (``layer``) and by gloo
(``collective``); beside it gloo's two all-to-alls of padded rows alone. Medians, the slowest rank's; all ranks share
the machine's cores, so compare numbers of one run only. There is no link, hence no floor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.comm.all_reduce import all_reduce
from moe_runtime.comm.collective import CollectiveDispatcher
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.transports import open_transport
from moe_runtime.eplb.placement import even_slots
from moe_runtime.kernels.combine import combine_slots
from moe_runtime.kernels.trees import tree_sum
from moe_runtime.launch.distributed import close_ranks, init_ranks

WARM_UP = 3
SHAPES = ((1, 2048), (128, 2048))

Row = dict[str, Any]


class Layer:
    """A layer of dispatch and combine on one rank.

    Args:
        group: All ranks.
        num_tokens: T of every rank.
        options: Dimensions.
    """

    def __init__(self, group: RankGroup, num_tokens: int, options: argparse.Namespace) -> None:
        generator = torch.Generator().manual_seed(num_tokens * group.size + group.rank)
        self.num_experts, num_topk = options.experts, options.topk
        self.x = torch.randn(num_tokens, options.hidden, generator=generator).bfloat16()
        chances = torch.rand(num_tokens, self.num_experts, generator=generator)
        self.ids = chances.topk(num_topk, -1).indices
        self.weights = torch.rand(num_tokens, num_topk, generator=generator)
        self.tokens_per_rank = [num_tokens] * group.size
        first_expert = (0, *itertools.accumulate(even_slots(self.num_experts, group.size)))
        self.dispatcher = CollectiveDispatcher(group, first_expert, num_topk)

    def run(self) -> torch.Tensor:
        """``[T, H]``: rows to the experts' ranks, weighted there, home, and added by slot."""
        received = self.dispatcher.dispatch(self.x, self.ids, self.weights, self.tokens_per_rank)
        rows = _weighted(received.x_ep_local[received.pairs.row], received.weights)
        return self.dispatcher.combine_sum(rows, received)

    def expected(self) -> torch.Tensor:
        """The same without any other rank."""
        num_topk = self.ids.shape[1]
        rows = _weighted(self.x.repeat_interleave(num_topk, 0), self.weights.flatten())
        return combine_slots(rows.view(-1, num_topk, self.x.shape[1]))


def median_us(group: RankGroup, call: Callable[[], Any], repeats: int) -> float:
    """Microseconds of a call that all ranks make: the slowest rank's median."""
    times_us = []
    for i in range(repeats + WARM_UP):
        start_s = time.perf_counter()
        call()
        if i >= WARM_UP:
            times_us.append(1e6 * (time.perf_counter() - start_s))
    return round(float(group.all_gather(torch.tensor([statistics.median(times_us)])).max()), 1)


def measure_layers(groups: dict[str, RankGroup], num_tokens: int, options: argparse.Namespace) -> list[Row]:
    """A row for each transport, and gloo's pair of all-to-alls in that of gloo."""
    rows = []
    for kind, group in groups.items():
        layer = Layer(group, num_tokens, options)
        row: Row = {"kind": kind, "tokens_per_rank": num_tokens}
        row["us"] = median_us(group, layer.run, options.repeats)
        row["bits"] = bits_text(group, torch.equal(layer.run(), layer.expected()))
        if kind == "collective":
            row["gloo_pair_us"] = median_us(group, _pair(group, layer), options.repeats)
        rows.append(row)
    return rows


def measure_all_reduce(group: RankGroup, shape: tuple[int, int], dtype: torch.dtype, repeats: int) -> Row:
    """The tree beside gloo's sum, in the part's dtype."""
    parts = [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(group.size)
    ]
    own = parts[group.rank]
    expected = tree_sum([part.float() for part in parts]).bfloat16()
    us = median_us(group, lambda: all_reduce(own, group, torch.bfloat16), repeats)
    equal = torch.equal(all_reduce(own, group, torch.bfloat16), expected)
    bits = "equal" if bits_text(group, equal) == "bits equal" else "DIFFERENT"
    x = own.clone()
    return {
        "shape": list(shape),
        "parts": str(dtype).removeprefix("torch."),
        "ours": [{"form": "tree", "schedule": "usual", "chosen": True, "us": us, "bits": bits}],
        "libraries_us": {"gloo all_reduce": median_us(group, lambda: dist.all_reduce(x), repeats)},
    }


def bits_text(group: RankGroup, equal: bool) -> str:
    """Of all ranks."""
    return "bits equal" if bool(group.all_gather(torch.tensor([equal])).all()) else "bits DIFFER"


def parse_options(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128], help="per rank")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--output", type=Path)
    return parser.parse_args(args)


def main() -> None:
    """Measure everything; rank 0 prints and writes."""
    options = parse_options()
    gloo = init_ranks()
    shared = open_transport(gloo, "symmetric").group
    content: dict[str, Any] = {
        "device": "cpu",
        "ranks": gloo.size,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "shapes": {
            "hidden": options.hidden,
            "experts": options.experts,
            "topk": options.topk,
            "dtype": "bfloat16",
        },
        "results": [],
        "all_reduce": [],
    }

    def write() -> None:
        if gloo.rank == 0 and options.output is not None:
            options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")

    for num_tokens in options.tokens:
        content["results"] += measure_layers({"layer": shared, "collective": gloo}, num_tokens, options)
        write()
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            content["all_reduce"].append(measure_all_reduce(shared, shape, dtype, options.repeats))
            write()
    if gloo.rank == 0:
        print(json.dumps(content, indent=1), flush=True)
    close_ranks(shared)


def _weighted(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """round(weight * row)."""
    return (rows.float() * weights[:, None]).to(rows.dtype)


def _pair(group: RankGroup, layer: Layer) -> Callable[[], None]:
    """Every row to every rank, and home as many from each as make K of every token."""
    num_tokens, hidden = layer.x.shape
    num_home = -(-num_tokens * layer.ids.shape[1] // group.size) * group.size
    x = torch.zeros(group.size * num_tokens, hidden, dtype=layer.x.dtype)
    rows = torch.zeros(num_home, hidden, dtype=layer.x.dtype)
    x_out, rows_out = torch.empty_like(x), torch.empty_like(rows)

    def run() -> None:
        dist.all_to_all_single(x_out, x)
        dist.all_to_all_single(rows_out, rows)

    return run


if __name__ == "__main__":
    main()
