"""One row per rank, those that have not said anything yet or have gone included: what ``/server_info`` and the status
page tell of them."""

from __future__ import annotations

import time
from typing import Any

from moe_runtime.server.client import EngineClient, Phase, RankState
from moe_runtime.server.config import ServerConfig

__all__ = ["rank_rows", "serving_phase"]


def rank_rows(config: ServerConfig, client: EngineClient) -> list[dict[str, Any]]:
    """Rows of all ranks, in order. Under ``tp``, requests and KV blocks are those of a group's first rank."""
    return [_row(config, client, rank) for rank in range(config.world_size)]


def serving_phase(config: ServerConfig, client: EngineClient, rank: int) -> str:
    """What a rank is doing, as far as is known here.

    ``starting``: it has not said that it can serve. ``gone``: its connection has ended. ``silent``: half of
    ``heartbeat_timeout_s`` has passed since its last message. ``draining``: it ends once nothing is left. ``running``:
    it has requests, or its group's first rank has. ``idle``: it waits for some.
    """
    state = client.ranks.get(rank)
    if state is None:
        return "starting"
    if state.has_gone:
        return "gone"
    if time.monotonic() - state.last_seen > config.heartbeat_timeout_s / 2:
        return "silent"
    if client.phase in (Phase.DRAINING, Phase.DRAINED):
        return "draining"
    first = client.ranks.get(rank - rank % config.tp, state).stats
    return "running" if first.num_running or first.num_waiting else "idle"


def _row(config: ServerConfig, client: EngineClient, rank: int) -> dict[str, Any]:
    state = client.ranks.get(rank)
    row = {"rank": rank, "phase": serving_phase(config, client, rank), "tp_rank": rank % config.tp}
    return {**row, **_known(state)} if state is not None else {**row, "pid": None}


def _known(state: RankState) -> dict[str, Any]:
    stats = state.stats
    return {
        "pid": state.pid,
        "device": state.info.get("device"),
        "last_seen_s": round(time.monotonic() - state.last_seen, 3),
        "num_open_sequences": state.num_sequences,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "kv_blocks_used": stats.num_kv_blocks - stats.num_free_kv_blocks,
        "kv_blocks": stats.num_kv_blocks,
        "kv_blocks_cached": stats.num_cached_kv_blocks,
        "num_computed_tokens": stats.num_computed_tokens,
        "num_steps": stats.num_steps,
        "last_step_ms": round(stats.last_step_ms, 3),
    }
