"""The FastAPI application."""

from __future__ import annotations

from fastapi import FastAPI

import moe_runtime
from moe_runtime.server.auth import ApiKeyMiddleware
from moe_runtime.server.chat import chat_router
from moe_runtime.server.completions import completions_router
from moe_runtime.server.context import Context
from moe_runtime.server.errors import install_error_handlers
from moe_runtime.server.health import health_router
from moe_runtime.server.info import info_router
from moe_runtime.server.kv_cache import kv_cache_router
from moe_runtime.server.load_dump import load_router
from moe_runtime.server.openapi import install_openapi
from moe_runtime.server.placement import placement_router
from moe_runtime.server.status import status_router
from moe_runtime.server.tokenization import tokenization_router

__all__ = ["create_app"]


def create_app(context: Context) -> FastAPI:
    """All endpoints over ``context``; starts nothing."""
    app = FastAPI(
        title="moe-runtime",
        version=moe_runtime.__version__,
        description="OpenAI-compatible, batch-invariant serving of mixture-of-experts models.",
        redoc_url=None,
        redirect_slashes=False,
    )
    for build in (
        completions_router,
        chat_router,
        tokenization_router,
        info_router,
        health_router,
        placement_router,
        kv_cache_router,
        load_router,
        status_router,
    ):
        app.include_router(build(context))
    install_error_handlers(app)
    install_openapi(app, context.config)
    if context.config.api_key is not None:
        app.add_middleware(ApiKeyMiddleware, api_key=context.config.api_key)
    return app
