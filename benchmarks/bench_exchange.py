"""Row exchange between CPU ranks of one host: milliseconds per all-to-all by transport, in one run.

    torchrun --nproc-per-node 8 benchmarks/bench_exchange.py --output benchmarks/results/exchange_cpu.json

Every rank sends ``--rows`` rows of ``--row-bytes`` bytes to every rank, as a layer's dispatch does. Medians of
``--repeats`` after a warm-up, the slowest rank's; compare ratios, not machines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.transports import open_transport
from moe_runtime.launch.distributed import close_ranks, init_ranks


def main() -> None:
    """Measure both transports; rank 0 prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--row-bytes", type=int, default=544)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    group = init_ranks()
    transports = [open_transport(group, name) for name in ("collective", "symmetric")]
    results = []
    for num_rows in options.rows:
        row: dict[str, float] = {"rows_per_pair": num_rows}
        for transport in transports:
            row[f"{transport.name}_ms"] = round(
                _exchange_ms(transport.group, num_rows, options.row_bytes, options.repeats), 3
            )
        results.append(row)
        if group.rank == 0:
            print(json.dumps(row), flush=True)
    if group.rank == 0 and options.output is not None:
        content = {
            "ranks": group.size,
            "cores": os.cpu_count(),
            "row_bytes": options.row_bytes,
            "results": results,
        }
        options.output.write_text(json.dumps(content, indent=1) + "\n")
    close_ranks(group)


def _exchange_ms(group: RankGroup, num_rows: int, row_bytes: int, repeats: int) -> float:
    """The slowest rank's median."""
    send = torch.zeros(group.size * num_rows, row_bytes, dtype=torch.uint8)
    splits = [num_rows] * group.size
    times = []
    for i in range(repeats + 20):
        start_s = time.perf_counter()
        group.exchange(send, splits, splits)
        if i >= 20:
            times.append(time.perf_counter() - start_s)
    return float(group.all_gather(torch.tensor([statistics.median(times) * 1e3])).max())


if __name__ == "__main__":
    main()
