"""``/health/live``: the process answers. ``/health/ready`` and ``/health``: requests are taken, and all ranks live."""

from __future__ import annotations

from fastapi import APIRouter

from moe_runtime.server.context import Context

__all__ = ["health_router"]


def health_router(context: Context) -> APIRouter:
    """The endpoints. Not ready is a 503 whose message says why."""
    router = APIRouter()

    @router.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "live"}

    @router.get("/health/ready")
    @router.get("/health")
    async def ready() -> dict[str, str]:
        error = context.client.readiness_error()
        if error is not None:
            raise error
        return {"status": "ready"}

    return router
