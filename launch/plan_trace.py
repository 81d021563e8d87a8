"""Replays a trace for the planner: reads it, finds the fleet for its means, and routes as the server's front end does.

Loads the engine, and torch with it, which planning without a trace does not.
"""

from __future__ import annotations

from pathlib import Path

from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.planner.answer import Answer, answer
from moe_runtime.planner.config import PlanConfig
from moe_runtime.planner.replay import Layout
from moe_runtime.planner.shape_configs import load_shape
from moe_runtime.planner.simulation import Simulation, simulate
from moe_runtime.planner.trace_files import open_trace
from moe_runtime.server.affinity import PrefixAffinity

__all__ = ["replay"]


def replay(config: PlanConfig, path: Path) -> tuple[Answer, Simulation]:
    """The fleet for a trace, and what the trace does to it.

    Raises:
        ValueError: the trace breaks a rule, or no fleet has room.
    """
    trace = open_trace(path, load_shape(config.model).vocab)
    found = answer(config.with_trace(trace.summary))
    return found, simulate(found, trace, _front_end, max_num_seqs=config.max_num_seqs, failures=config.fail)


def _front_end(layout: Layout) -> PrefixAffinity:
    ranks = range(layout.num_groups)
    return PrefixAffinity(ranks, layout.scheduler.max_num_seqs, BLOCK_SIZE if layout.prefix_cache else None)
