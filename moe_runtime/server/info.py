"""``/v1/models``, ``/version``, ``/server_info`` and ``/metrics``."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

import moe_runtime
from moe_runtime.server.client import EngineClient
from moe_runtime.server.context import Context
from moe_runtime.server.metrics import CONTENT_TYPE
from moe_runtime.server.rank_rows import rank_rows

__all__ = ["info_router"]

SHARED_NAMES = ("dispatcher", "dispatcher_reason", "tp_transport", "tp_transport_reason")


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
        **{name: shared[name] for name in SHARED_NAMES if name in shared},
        "version": moe_runtime.__version__,
        "phase": client.phase.value,
        "served_model_name": config.served_model_name,
        "world_size": config.world_size,
        "limits": dataclasses.asdict(config.limits),
        "sampling_defaults": context.sampling_defaults,
        "num_open_requests": client.num_open_requests,
        "rearrangement": client.rearrangement,
        "rearrangement_fixed_reason": config.experts_fixed_reason or None,
        "ranks": [
            {
                **row,
                "doing": _doing(client, row["rank"]),
                "info": _of_rank(client, row["rank"], "info"),
                "stats": _of_rank(client, row["rank"], "stats"),
            }
            for row in rank_rows(config, client)
        ],
    }


def _doing(client: EngineClient, rank: int) -> str | None:
    """What the rank's main thread does, by its last pulse."""
    pulse = client.watch.pulses.get(rank)
    return None if pulse is None else pulse.phase


def _of_rank(client: EngineClient, rank: int, name: str) -> Any:
    return getattr(client.ranks[rank], name) if rank in client.ranks else None
