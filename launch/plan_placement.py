"""``python -m moe_runtime.plan_placement``: a window of load or a routing log in, a placement file and a report out.

Needs no model and no GPU. The report goes to standard error: balancedness without knowledge of loads and with the plan,
the peak over the bound that no placement is below, and, where there are parts to split, the same on the second half of
the load under a plan made from the first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from moe_runtime.config import PlanPlacementConfig
from moe_runtime.eplb.balance import balance_of
from moe_runtime.eplb.load_window import LoadWindow
from moe_runtime.eplb.loads import IntArray
from moe_runtime.eplb.placement import ModelPlacement, contiguous_model_placement, even_slots
from moe_runtime.eplb.placement_file import placement_to_json, write_placement
from moe_runtime.eplb.policy import plan_placement
from moe_runtime.eplb.routing_log import MAGIC, routing_log_counts
from moe_runtime.exit_codes import EXIT_OK
from moe_runtime.launch.cli import parse_config, usage_error

__all__ = ["main", "read_counts", "report"]


def main(args: Sequence[str] | None = None) -> int:
    """Plan. Returns the exit code."""
    config = parse_config(PlanPlacementConfig, args, prog="moe_runtime.plan_placement")
    try:
        counts = read_counts(config.load)
        if not counts.any():
            raise ValueError(f"load ({config.load}) holds no tokens")
        placement = _plan(config, counts)
        if str(config.output) == "-":
            sys.stdout.write(json.dumps(placement_to_json(placement)) + "\n")
        else:
            write_placement(config.output, placement)
    except (ValueError, OSError) as error:
        usage_error(str(error))
    sys.stderr.write("".join(f"{line}\n" for line in report(config, counts, placement)))
    return EXIT_OK


def read_counts(path: Path) -> IntArray:
    """``[num_buckets, num_layers, num_logical]`` int64 tokens of a window or a log.

    Raises:
        ValueError: the file cannot be read, or is neither.
    """
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
    except OSError as error:
        raise ValueError(f"load ({path}) cannot be read: {error.strerror}") from None
    if start == MAGIC:
        return routing_log_counts(path)
    window = LoadWindow.load(path)
    held = window.buckets()
    return held if len(held) else window.totals()[None]


def report(config: PlanPlacementConfig, counts: IntArray, placement: ModelPlacement) -> list[str]:
    """What the plan is worth, line by line."""
    _, num_layers, num_experts = counts.shape
    start = contiguous_model_placement(num_layers, num_experts, config.ep_size, config.num_redundant_experts)
    before, after = balance_of(counts, start), balance_of(counts, placement)
    lines = [
        f"{num_layers} layers of {num_experts} experts, {int(counts.sum())} pairs",
        f"balancedness {after.overall:.4f}; {before.overall:.4f} with consecutive ids",
        f"peak over bound {after.over_bound.max():.4f} at most, over all layers",
    ]
    if len(counts) > 1:
        first, second = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        held_out = balance_of(second, _plan(config, first))
        lines.append(
            f"planned on the first half: balancedness {held_out.overall:.4f} on the second; "
            f"{balance_of(second, start).overall:.4f} with consecutive ids"
        )
    return lines


def _plan(config: PlanPlacementConfig, counts: IntArray) -> ModelPlacement:
    num_experts = counts.shape[2]
    most = num_experts * (config.ep_size - 1)
    if config.num_redundant_experts > most:
        raise ValueError(
            f"num_redundant_experts ({config.num_redundant_experts}) must be at most {most}: every one of "
            f"{num_experts} experts on every one of {config.ep_size} ranks"
        )
    slots = even_slots(num_experts + config.num_redundant_experts, config.ep_size, config.num_nodes)
    return plan_placement(counts, slots, objective=config.objective, num_nodes=config.num_nodes)
