"""The OpenAPI document: FastAPI's own, and the schemas of the bodies that ``body.py`` reads."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from moe_runtime.server.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody

__all__ = ["body_schema", "install_openapi"]

_REF = "#/components/schemas/{model}"
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint that takes ``model`` as its body."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI) -> None:
    """Make ``app`` serve a document with all schemas and the errors that every path may answer with."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    _, definitions = models_json_schema(
        [(body, "validation") for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)],
        ref_template=_REF,
    )
    document["components"] = {"schemas": {**definitions["$defs"], "Error": _ERROR_SCHEMA}}
    content = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            for status in ("4XX", "5XX"):
                operation["responses"][status] = {"description": "Error", "content": content}
    return document
