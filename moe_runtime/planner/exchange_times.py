"""Times of exchanging rows alone: between CPU ranks here, between GPUs from what the benchmark of dispatch wrote."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.planner.shapes import ModelShape

if TYPE_CHECKING:
    from moe_runtime.comm.groups import RankGroup

__all__ = ["cpu_exchange_times", "gpu_exchange_rows"]

TOKENS = (1, 8, 32, 128)
REPEATS, WARM_UPS = 40, 5

_Row = dict[str, Any]


def cpu_exchange_times(group: RankGroup, shape: ModelShape, transport: str) -> Iterator[_Row]:
    """Dispatch and combine of a layer around experts that do nothing; the slowest rank's median. A collective.

    Args:
        group: The ranks, with the transport's links.
        shape: Of the model.
        transport: Its name.
    """
    import torch

    from moe_runtime.comm.collective import CollectiveDispatcher
    from moe_runtime.eplb.placement import contiguous_model_placement

    placement = contiguous_model_placement(1, shape.num_experts, group.size)
    dispatcher = CollectiveDispatcher(group, placement.first_expert, shape.num_topk)
    dtype = torch.float32 if shape.dtype == "float32" else torch.bfloat16
    generator = torch.Generator().manual_seed(group.rank)
    for tokens in TOKENS:
        x = torch.randn(tokens, shape.hidden, generator=generator).to(dtype)
        ids = torch.rand(tokens, shape.num_experts, generator=generator).topk(shape.num_topk, 1).indices
        weights = torch.full((tokens, shape.num_topk), 1 / shape.num_topk)
        times = []
        for i in range(REPEATS + WARM_UPS):
            start_s = time.perf_counter()
            received = dispatcher.dispatch(x, ids, weights, [tokens] * group.size)
            rows = torch.zeros(len(received.weights), shape.hidden, dtype=dtype)
            dispatcher.combine_sum(rows, received)
            if i >= WARM_UPS:
                times.append(1e6 * (time.perf_counter() - start_s))
        slowest = float(group.all_gather(torch.tensor([statistics.median(times)])).max())
        yield {"transport": transport, "ep_size": group.size, "tokens": tokens, "us": round(slowest, 1)}


def gpu_exchange_rows(path: Path) -> Sequence[_Row]:
    """Rows of a device file's ``exchange`` from the result of ``benchmarks/bench_dispatch.py``.

    Raises:
        ValueError: the file is not such a result.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        size = int(content["ranks"])
        layers = [row for row in content["results"] if row["kind"] == "layer"]
        rows = [
            {
                "transport": "symmetric",
                "ep_size": size,
                "tokens": row["tokens_per_rank"],
                "bytes_out": row["bytes_out"],
                "us": row["us"],
                "exposed_us": row["exposed_us"],
            }
            for row in layers
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = "must be what benchmarks/bench_dispatch.py writes"
        raise ValueError(f"dispatch_results ({path}) {rule}: {error}") from None
    if not rows:
        raise ValueError(f"dispatch_results ({path}) must hold results of the kind 'layer'")
    return rows
