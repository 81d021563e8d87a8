"""``/expert_load``: the window of expert load, as JSON, or with ``?format=npz`` as the file that planners read.

The JSON is bounded by layers times experts, the file by 16 buckets of them (docs/routing.md).
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.context import Context
from moe_runtime.server.errors import ApiError
from moe_runtime.server.expert_load import LoadTally

__all__ = ["FORMAT", "load_router"]

FORMAT = "moe-runtime-expert-load"
_FORMATS = ("json", "npz")
_PARAMETERS = {
    "parameters": [
        {
            "name": "format",
            "in": "query",
            "required": False,
            "schema": {"type": "string", "enum": list(_FORMATS), "default": "json"},
        }
    ]
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The window",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


def load_router(context: Context) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.get("/expert_load", openapi_extra=_PARAMETERS, responses=_ANSWERS)
    async def dump(http_request: HttpRequest) -> Response:
        wanted = http_request.query_params.get("format", "json")
        if wanted not in _FORMATS:
            raise InvalidRequestError(
                f"format ({wanted}) must be one of {', '.join(_FORMATS)}", param="format"
            )
        context.require_ready()
        load = context.client.load
        if load is None:
            raise ApiError(404, "the model has no layer with experts", code="no_experts")
        headers = {"Cache-Control": "no-store"}
        if wanted == "npz":
            headers["Content-Disposition"] = 'attachment; filename="expert_load.npz"'
            data = await asyncio.to_thread(load.window.copy().dump)  # compressing takes longer than a token
            return Response(data, media_type="application/octet-stream", headers=headers)
        return Response(
            msgspec.json.encode(_document(load, context.config.moe_layer_ids)),
            media_type="application/json",
            headers=headers,
        )

    return router


def _document(load: LoadTally, moe_layer_ids: list[int]) -> dict[str, Any]:
    window, summary = load.window, load.summary()
    hottest = summary.hottest
    return {
        "format": FORMAT,
        "version": 1,
        "num_steps": window.num_held_steps,
        "num_seen_steps": window.num_seen_steps,
        "window_steps": window.num_steps,
        "steps_per_bucket": window.steps_per_bucket,
        "bucket_steps": window.bucket_steps().tolist(),
        "moe_layer_ids": moe_layer_ids,
        "num_logical_experts": window.num_logical_experts,
        "counts": window.totals().tolist(),
        "placement_sha256": load.placement.sha256,
        "balancedness": {
            "overall": summary.balance.overall,
            "per_layer": summary.balance.per_layer.tolist(),
        },
        "peak_over_bound": summary.balance.over_bound.tolist(),
        "hottest_expert": None
        if hottest is None
        else {
            "layer": moe_layer_ids[hottest.layer_idx],
            "expert": hottest.expert_idx,
            "pairs": hottest.num_tokens,
            "share": hottest.share,
        },
    }
