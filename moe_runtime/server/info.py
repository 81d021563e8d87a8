"""``/v1/models``, ``/version``, ``/server_info`` and ``/metrics``."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

import moe_runtime
from moe_runtime.server.client import RankState
from moe_runtime.server.context import Context
from moe_runtime.server.metrics import CONTENT_TYPE

__all__ = ["info_router"]


def info_router(context: Context) -> APIRouter:
    """The endpoints."""
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(context)]}

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> dict[str, Any]:
        context.require_model(model)
        return _model(context)

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": moe_runtime.__version__}

    @router.get("/server_info")
    async def server_info() -> Response:
        return Response(msgspec.json.encode(_server_info(context)), media_type="application/json")

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(context.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    return router


def _model(context: Context) -> dict[str, Any]:
    return {
        "id": context.config.served_model_name,
        "object": "model",
        "created": context.created,
        "owned_by": "moe-runtime",
        "max_model_len": context.config.limits.max_total_tokens,
    }


def _server_info(context: Context) -> dict[str, Any]:
    config, client = context.config, context.client
    # Settled after the front end started, alike on all ranks.
    shared = client.ranks[0].info if 0 in client.ranks else {}
    return {
        **config.info,
        **{name: shared[name] for name in ("dispatcher", "dispatcher_reason") if name in shared},
        "version": moe_runtime.__version__,
        "phase": client.phase.value,
        "served_model_name": config.served_model_name,
        "world_size": config.world_size,
        "limits": dataclasses.asdict(config.limits),
        "sampling_defaults": context.sampling_defaults,
        "num_open_requests": client.num_open_requests,
        "rearrangement": client.rearrangement,
        "rearrangement_fixed_reason": config.experts_fixed_reason or None,
        "ranks": [_rank(rank, client.ranks[rank]) for rank in sorted(client.ranks)],
    }


def _rank(rank: int, state: RankState) -> dict[str, Any]:
    return {
        "rank": rank,
        "pid": state.pid,
        "last_seen_s": round(time.monotonic() - state.last_seen, 3),
        "num_open_sequences": state.num_sequences,
        "info": state.info,
        "stats": state.stats,
    }
