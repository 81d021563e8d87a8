"""``/expert_placement``: where experts are, and moving them while serving.

``POST`` takes a placement (docs/eplb.md) or ``{"rebalance": true}`` and answers when the move is complete:

200 moved   400 not a placement for this deployment   409 experts stay here, or a move is under way
500 the move has failed, with the reason; layers moved so far stay   503 no ranks, or the server leaves
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from moe_runtime.engine.messages import MoveResult
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.eplb.placement_file import check_fits, placement_from_json, placement_to_json
from moe_runtime.errors import InvalidRequestError
from moe_runtime.server.body import decode_json, read_body
from moe_runtime.server.context import Context
from moe_runtime.server.errors import ApiError, unavailable

__all__ = ["placement_router"]

_BODY_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "oneOf": [
                        {"type": "object", "title": "A placement", "required": ["format", "version"]},
                        {
                            "type": "object",
                            "required": ["rebalance"],
                            "properties": {"rebalance": {"const": True}},
                            "additionalProperties": False,
                        },
                    ]
                }
            }
        },
    }
}


def placement_router(context: Context) -> APIRouter:
    """The endpoints."""
    router = APIRouter()

    @router.get("/expert_placement")
    async def show() -> Response:
        context.require_ready()
        return _document(context)

    @router.post("/expert_placement", openapi_extra=_BODY_SCHEMA)
    async def move(http_request: HttpRequest) -> Response:
        target = _target(await read_body(http_request, context.config.max_body_bytes), context)
        context.require_ready()
        if context.config.experts_fixed_reason:
            raise ApiError(
                409, f"experts stay here: {context.config.experts_fixed_reason}", code="experts_fixed"
            )
        physical = None if target is None else target.physical_to_logical_map.astype("<i4").tobytes()
        _check_result(await context.client.move_experts(physical))
        return _document(context)

    return router


def _target(data: bytes, context: Context) -> ModelPlacement | None:
    """The placement that a body asks for; None for one that evens out the load."""
    fields = decode_json(data)
    if isinstance(fields, dict) and "rebalance" in fields:
        if fields != {"rebalance": True} or fields["rebalance"] is not True:
            raise InvalidRequestError("rebalance must be true, and the only field", param="rebalance")
        return None
    now = _placement(context)
    try:
        target = placement_from_json(fields)
        check_fits(target, now.num_layers, now.num_logical_experts, now.ep_size)
        if target.slots_per_rank != now.slots_per_rank:
            raise ValueError(
                f"slots_per_rank ({list(target.slots_per_rank)}) must be those of the deployment "
                f"({list(now.slots_per_rank)})"
            )
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
    return target


def _placement(context: Context) -> ModelPlacement:
    """Where experts are now."""
    if context.client.load is None:
        raise ApiError(409, f"experts stay here: {context.config.experts_fixed_reason}", code="experts_fixed")
    return context.client.load.placement


def _check_result(result: MoveResult) -> None:
    match result.outcome:
        case "succeeded":
            return
        case "refused":
            raise ApiError(409, result.reason, code="rearrangement_refused")
        case "abandoned":
            raise unavailable(f"the rearrangement was given up: {result.reason}", code="draining")
        case _:
            message = f"the rearrangement has failed: {result.reason}"
            raise ApiError(500, message, type="server_error", code="rearrangement_failed")


def _document(context: Context) -> Response:
    placement, report = _placement(context), context.client.placement
    versions = [0] * placement.num_layers if report is None else list(report.versions)
    document: dict[str, Any] = {
        "placement": placement_to_json(placement),
        "layer_versions": versions,
        "fixed_reason": context.config.experts_fixed_reason or None,
        "rearrangement": context.client.rearrangement,
    }
    return Response(msgspec.json.encode(document), media_type="application/json")
