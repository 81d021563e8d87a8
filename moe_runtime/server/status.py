"""The status page at ``/``, its files, and ``/status``, the numbers it polls.

The page and its files need no API key and tell nothing of the deployment; ``/status`` asks for it.
"""

from __future__ import annotations

import time
from importlib import resources
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

import moe_runtime
from moe_runtime.server.context import Context
from moe_runtime.server.rank_rows import rank_rows

__all__ = ["CONTENT_SECURITY_POLICY", "status_router"]

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILES = {
    "/": ("status.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
    "/status.svg": ("status.svg", "image/svg+xml"),
}


def status_router(context: Context) -> APIRouter:
    """The endpoints."""
    router = APIRouter()
    folder = resources.files("moe_runtime.server") / "page"
    for path, (name, media_type) in _FILES.items():
        _add_file(router, path, (folder / name).read_bytes(), media_type)

    @router.get("/status")
    async def status() -> Response:
        return Response(
            msgspec.json.encode(_status(context)),
            media_type="application/json",
            headers={"Cache-Control": "no-store"},
        )

    return router


def _add_file(router: APIRouter, path: str, data: bytes, media_type: str) -> None:
    headers = {
        "Content-Security-Policy": CONTENT_SECURITY_POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def file() -> Response:
        return Response(data, media_type=media_type, headers=headers)

    router.add_api_route(path, file, include_in_schema=False)


def _status(context: Context) -> dict[str, Any]:
    config, client, metrics = context.config, context.client, context.metrics
    error = client.unavailable_error()
    rows = rank_rows(config, client)
    load = None
    if client.load is not None:
        load = client.load.summary()
        for row in rows:
            row["routed_pairs"] = load.pairs[row["rank"]]
            row["num_local_experts"] = client.load.num_local_experts(row["rank"])
    return {
        "version": moe_runtime.__version__,
        "model": config.served_model_name,
        "phase": client.phase.value,
        "reason": None if error is None else error.message,
        "world_size": config.world_size,
        "tp": config.tp,
        **{name: config.info.get(name) for name in ("invariance", "dtype", "device", "system_fingerprint")},
        "time_s": time.monotonic(),
        "uptime_s": round(time.time() - context.created, 1),
        "num_open_requests": client.num_open_requests,
        "num_running": sum(row.get("num_running", 0) for row in rows),
        "num_waiting": sum(row.get("num_waiting", 0) for row in rows),
        "prompt_tokens_total": metrics.num_prompt_tokens,
        "generation_tokens_total": metrics.num_generation_tokens,
        "expert_balancedness": None if load is None else load.balance.overall,
        "ranks": rows,
    }
