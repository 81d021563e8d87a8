"""All-reduce of ranks on GPUs of one host: microseconds per call inside a CUDA graph, ours beside the libraries'.

    torchrun --nproc-per-node 2 benchmarks/bench_all_reduce.py --output benchmarks/results/all_reduce_h200.json

Parts of bf16 and fp32, the sum in bf16; NCCL and torch's symmetric-memory operations give the sum in the part's dtype.
A graph holds ``CALLS`` calls (``CALLS_LARGE`` of the largest size) that follow each other at once, ours with dependent
launch. Times are medians over replays, the slowest rank's. Every form and schedule of ours is compared with the tree
first. The floor is what a rank must receive at ``LINK_GBPS``, in the form that receives less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm
import triton
from rank_timing import Ranks

from moe_runtime.comm.symmetric_all_reduce import SymmetricAllReduce
from moe_runtime.comm.symmetric_memory import SymmetricSpace, carved_bytes
from moe_runtime.kernels.all_reduce_form import prefers_one_shot, received_bytes
from moe_runtime.kernels.all_reduce_triton import AllReduceSchedule, all_reduce_reference
from moe_runtime.kernels.peer_flags_triton import PeerFlags, count_step

LINK_GBPS = 365.0
"""One direction of NVLink as SM stores reach it on two H200; nominally 450."""
SHAPES = [(1, 2048), (128, 2048), (4096, 2048)]
CALLS, CALLS_LARGE = 48, 8
LARGE_ELEMENTS = 1 << 20
MUST_US = {((128, 2048), torch.bfloat16): 5.5, ((128, 2048), torch.float32): 7.0}

OTHER_SCHEDULES = {
    2048: [(256, 1, 64), (1024, 4, 64), (2048, 8, 64)],
    128 * 2048: [(1024, 4, 256), (2048, 8, 256), (4096, 8, 256)],
    4096 * 2048: [(2048, 4, 1024), (4096, 8, 1024), (8192, 8, 132)],
}
"""(block, warps, most programs) beside the usual one, by elements."""

Row = dict[str, Any]


def floor_us(num_elements: int, part_dtype: torch.dtype, size: int) -> float:
    """What a rank must receive: all other parts, or a slice of them and the others' slices of the bf16 sum."""
    part, total = num_elements * part_dtype.itemsize, num_elements * torch.bfloat16.itemsize
    fewest = min(received_bytes(part, total, size, one_shot=one_shot) for one_shot in (True, False))
    return fewest / (LINK_GBPS * 1e3)


def measure_ours(
    ranks: Ranks, shape: tuple[int, int], part_dtype: torch.dtype, *, only_usual: bool = False
) -> list[Row]:
    """A row per form and schedule."""
    group, num_elements = ranks.group, shape[0] * shape[1]
    num_calls = CALLS_LARGE if num_elements > LARGE_ELEMENTS else CALLS
    num_channels = SymmetricAllReduce.num_channels(num_calls)
    num_bytes = carved_bytes((num_channels, group.size), torch.int32)
    num_bytes += SymmetricAllReduce.num_bytes(num_elements, part_dtype, torch.bfloat16)
    space = SymmetricSpace.connect(group, num_bytes, ranks.device)
    words = space.carve("words", (num_channels, group.size), torch.int32)
    counter = torch.zeros(2, dtype=torch.int32, device=ranks.device)
    live = torch.ones(1, dtype=torch.int32, device=ranks.device)
    flags = PeerFlags(
        words=words.local, offsets=words.offsets, step=counter[:1], rank=group.rank, size=group.size
    )
    reducer = SymmetricAllReduce(
        space, flags, 0, max_calls=num_calls, max_elements=num_elements,
        part_dtype=part_dtype, out_dtype=torch.bfloat16,
    )  # fmt: skip
    parts = []
    for rank in range(group.size):
        generator = torch.Generator(ranks.device).manual_seed(rank)
        parts.append(torch.randn(num_elements, generator=generator, device=ranks.device).to(part_dtype))
    for i in range(2):
        space.buffers[f"all_reduce_part{i}"].local.copy_(parts[group.rank])
    expected = all_reduce_reference(parts, torch.bfloat16)
    sums = [space.buffers[f"all_reduce_sum{i}"].local for i in range(2)]
    advance = partial(count_step, counter, live, pdl=True)
    rows: list[Row] = []
    usual = prefers_one_shot(num_elements * part_dtype.itemsize, group.size)
    for one_shot in (True, False):
        tried: list[AllReduceSchedule | None] = [None]
        if one_shot == usual and not only_usual:
            tried += [
                AllReduceSchedule(block=b, num_warps=w, max_programs=p)
                for b, w, p in OTHER_SCHEDULES[num_elements]
            ]
        for schedule in tried:
            us, equal = _measure_one(ranks, reducer, num_calls, expected, one_shot, schedule, advance, sums)
            name = "usual" if schedule is None else f"{schedule.block} x {schedule.num_warps} warps"
            if schedule is not None:
                name += f", {schedule.max_programs} programs at most"
            rows.append(
                {
                    "form": "one-shot" if one_shot else "exchange",
                    "schedule": name,
                    "chosen": one_shot == usual and schedule is None,
                    "us": round(us, 2),
                    "bits": "equal" if equal else "DIFFERENT",
                }
            )
    return rows


def _measure_one(
    ranks: Ranks,
    reducer: SymmetricAllReduce,
    num_calls: int,
    expected: torch.Tensor,
    one_shot: bool,
    schedule: AllReduceSchedule | None,
    advance: Callable[[], None],
    results: Sequence[torch.Tensor],
) -> tuple[float, bool]:
    """Microseconds per call, and whether both sets' results are the tree's on every rank."""

    def launch() -> None:
        advance()
        for _ in range(num_calls):
            reducer.reduce(expected.numel(), one_shot=one_shot, schedule=schedule, pdl=True)
        reducer.end_step(pdl=True)

    for total in results:
        total.fill_(float("nan"))
    us = ranks.graph_us(launch, num_calls)
    equal = torch.tensor([int(all(torch.equal(total, expected) for total in results))])
    return us, bool(ranks.group.all_gather(equal).all())


def measure_libraries(ranks: Ranks, num_elements: int, dtype: torch.dtype) -> Row:
    """Microseconds of NCCL and of torch's symmetric-memory operations."""
    num_calls = CALLS_LARGE if num_elements > LARGE_ELEMENTS else CALLS
    world = dist.group.WORLD
    assert world is not None, "torch.distributed has started"
    x = torch.zeros(num_elements, dtype=dtype, device=ranks.device)
    shared = symm.empty(num_elements, dtype=dtype, device=ranks.device)
    symm.rendezvous(shared, world)
    shared.zero_()
    operations: dict[str, Callable[[], Any]] = {
        "NCCL all_reduce": lambda: dist.all_reduce(x),
        "symm_mem one_shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", world.group_name),
        "symm_mem two_shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", world.group_name),
    }

    def repeat(operation: Callable[[], Any]) -> None:
        for _ in range(num_calls):
            operation()

    return {
        name: round(ranks.graph_us(lambda operation=operation: repeat(operation), num_calls), 2)  # type: ignore[misc]
        for name, operation in operations.items()
    }


def parse_options(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--usual", action="store_true", help="no schedule but the usual one")
    parser.add_argument("--commit", default="", help="recorded with the results")
    return parser.parse_args(args)


def main() -> None:
    """Measure everything; rank 0 prints and writes."""
    options = parse_options()
    start_s = time.monotonic()
    ranks = Ranks()
    results = []
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            num_elements = shape[0] * shape[1]
            row: Row = {
                "shape": list(shape),
                "parts": str(dtype).removeprefix("torch."),
                "floor_us": round(floor_us(num_elements, dtype, ranks.group.size), 2),
                "must_us": MUST_US.get((shape, dtype)) if ranks.group.size == 2 else None,
                "ours": measure_ours(ranks, shape, dtype, only_usual=options.usual),
                "libraries_us": measure_libraries(ranks, num_elements, dtype),
            }
            results.append(row)
            if ranks.group.rank == 0:
                print(f"[{time.monotonic() - start_s:.0f} s] {json.dumps(row)}", flush=True)
                if options.output is not None:
                    content = {
                        "device": torch.cuda.get_device_name(),
                        "ranks": ranks.group.size,
                        "torch": torch.__version__,
                        "triton": triton.__version__,
                        "commit": options.commit,
                        "link_gbps": LINK_GBPS,
                        "results": results,
                    }
                    options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="ascii")
    ranks.meet()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
