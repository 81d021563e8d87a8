"""The OpenAPI document: paths from FastAPI, bodies from ``schemas``, values from ``engine/request``, answers from
``responses``, and the fields of other servers from ``unsupported``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from moe_runtime.engine import request as engine_request
from moe_runtime.engine.request import RequestLimits
from moe_runtime.engine.structured_outputs import MAX_CHOICE_TEXTS, MAX_GRAMMAR_BYTES
from moe_runtime.server.auth import OPEN_PATHS
from moe_runtime.server.config import ServerConfig
from moe_runtime.server.prompts import MAX_PROMPTS
from moe_runtime.server.responses import ANSWERS, CHUNKS, ErrorResponse
from moe_runtime.server.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    StructuredOutputsBody,
    TokenizeBody,
)
from moe_runtime.server.unsupported import INERT_FIELDS, NEUTRAL_VALUES

__all__ = ["body_schema", "install_openapi"]

_REF = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_EVERY_ERROR = {
    "400": "A bad value, field, JSON or HTTP: `message` holds field, value and rule, `param` the field",
    "404": "There is no such path or model",
    "405": "The path does not take this method",
    "408": "The request has not arrived whole in time",
    "500": "A fault of the server",
}
_BODY_ERRORS = {
    "413": "The body is too large",
    "415": "The body is not plain JSON",
    "429": "Too many requests are waiting; Retry-After says when to come back",
    "503": "Starting, draining, or a rank is lost; with Retry-After where that helps",
    "504": "The request has taken longer than the server allows",
}
_JSON_TYPES = {dict: "object", bool: "boolean", str: "string"}


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of an endpoint that takes ``model`` as its body."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI, config: ServerConfig) -> None:
    """Make ``app`` serve a document of what it takes and answers, with the limits of ``config``."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, config)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, config: ServerConfig) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    models: dict[str, type[BaseModel]] = {}  # each once, in a fixed order
    listed: list[type[BaseModel]] = [*_BODIES, *ANSWERS.values(), *CHUNKS.values(), ErrorResponse]
    for model in listed:
        models[model.__name__] = model
    _, definitions = models_json_schema(
        [(model, "validation") for model in models.values()], ref_template=_REF
    )
    schemas = definitions["$defs"]
    for body in _BODIES:
        _add_limits(schemas[body.__name__]["properties"], config.limits, config.served_model_name)
    _add_form_limits(schemas[StructuredOutputsBody.__name__]["properties"])
    for body in (CompletionBody, ChatBody):
        _add_foreign_fields(schemas[body.__name__]["properties"])
    document["components"] = {"schemas": schemas}
    if config.api_key is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _add_answers(path, operation, is_keyed=config.api_key is not None and path not in OPEN_PATHS)
    return document


def _add_answers(path: str, operation: dict[str, Any], *, is_keyed: bool) -> None:
    responses: dict[str, Any] = {}
    if path in ANSWERS:
        schema = {"$ref": _REF.format(model=ANSWERS[path].__name__)}
        responses["200"] = {"description": "Success", "content": {"application/json": {"schema": schema}}}
    elif "200" in operation["responses"]:
        responses["200"] = operation["responses"]["200"]
    if path == "/metrics":
        responses["200"] = {
            "description": "Success",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    if path in CHUNKS:
        responses["200"]["content"]["text/event-stream"] = {"schema": _event(CHUNKS[path])}
    errors = dict(_EVERY_ERROR)
    if "requestBody" in operation or path in ("/health", "/health/ready"):
        errors |= _BODY_ERRORS
    if is_keyed:
        errors["401"] = "The key is missing or wrong"
        operation["security"] = [{"key": []}]
    error_content = {"application/json": {"schema": {"$ref": _REF.format(model=ErrorResponse.__name__)}}}
    for status, description in sorted(errors.items()):
        responses[status] = {"description": description, "content": error_content}
    operation["responses"] = responses


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    text = (
        "Where `stream` is true: one event. The last one's data is `[DONE]`. A fault after the first event is an "
        "event with an `ErrorResponse`, and no `[DONE]` follows"
    )
    document = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _REF.format(model=chunk.__name__)},
    }
    data = {"anyOf": [{"const": "[DONE]"}, document]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"], "description": text}


def _add_foreign_fields(properties: dict[str, Any]) -> None:
    """Fields that ``unsupported`` takes out of a body, those left that the endpoint has itself."""
    for name, kind in INERT_FIELDS.items():
        schema = {"type": [_JSON_TYPES[kind], "null"], "description": "Accepted; changes nothing"}
        properties.setdefault(name, schema)
    for name, values in NEUTRAL_VALUES.items():
        text = "Not implemented: only values that change nothing are accepted"
        properties.setdefault(name, {"enum": [*values, None], "description": text})


def _add_limits(properties: dict[str, Any], limits: RequestLimits, model_name: str) -> None:
    """Add the values that ``engine/request`` accepts to the schemas of fields, by name and JSON type."""
    token_id = {"type": "integer", "minimum": 0, "maximum": limits.vocab_size - 1}
    ids = {"type": "array", "items": token_id, "minItems": 1, "maxItems": limits.max_total_tokens}
    text = {"type": "string", "minLength": 1}
    stop = {"minLength": 1, "maxLength": engine_request.MAX_STOP_STRING_CHARS}
    num_logprobs = min(engine_request.MAX_LOGPROBS, limits.vocab_size)
    least, most = engine_request.REPETITION_PENALTY_RANGE
    penalty = {"minimum": -engine_request.MAX_PENALTY, "maximum": engine_request.MAX_PENALTY}
    rules: Mapping[str, Mapping[str, dict[str, Any]]] = {
        "model": {"string": {"enum": [model_name]}},
        "temperature": {"number": {"minimum": 0, "maximum": 100}},
        "top_p": {"number": {"exclusiveMinimum": 0, "maximum": 1}},
        "min_p": {"number": {"minimum": 0, "maximum": 1}},
        "top_k": {"integer": {"minimum": -1}},
        "n": {"integer": {"minimum": 1, "maximum": engine_request.MAX_CHOICES}},
        "max_tokens": {"integer": {"minimum": 0, "maximum": limits.max_total_tokens}},
        "max_completion_tokens": {"integer": {"minimum": 0, "maximum": limits.max_total_tokens}},
        "logprobs": {"integer": {"minimum": 0, "maximum": num_logprobs}},
        "top_logprobs": {"integer": {"minimum": 0, "maximum": num_logprobs}},
        "prompt_logprobs": {"integer": {"minimum": 0, "maximum": num_logprobs}},
        "stop": {
            "string": stop,
            "array": {"items": {"type": "string", **stop}, "maxItems": engine_request.MAX_STOP_STRINGS},
        },
        "stop_token_ids": {"array": {"items": token_id, "maxItems": engine_request.MAX_STOP_TOKEN_IDS}},
        "forced_token_ids": {"array": ids},
        "presence_penalty": {"number": penalty},
        "frequency_penalty": {"number": penalty},
        "repetition_penalty": {"number": {"minimum": least, "maximum": most}},
        "min_tokens": {"integer": {"minimum": 0, "maximum": limits.max_total_tokens}},
        "bad_words": {
            "array": {
                "items": {**text, "maxLength": engine_request.MAX_BAD_WORD_CHARS},
                "maxItems": engine_request.MAX_BAD_WORDS,
            }
        },
        "allowed_token_ids": {
            "array": {"items": token_id, "minItems": 1, "maxItems": engine_request.MAX_ALLOWED_TOKEN_IDS}
        },
        "cache_salt": {"string": {"minLength": 1, "maxLength": engine_request.MAX_CACHE_SALT_CHARS}},
        "tokens": {"array": {"items": token_id}},
        "messages": {"array": {"minItems": 1}},
    }
    for name, schema in properties.items():
        for branch in _branches(schema):
            branch |= rules.get(name, {}).get(branch.get("type", ""), {})
    if len(properties.get("prompt", {}).get("anyOf", ())) > 2:  # /tokenize takes a string alone
        forms: list[dict[str, Any]] = [{"items": text}, ids, {"items": ids}]
        lists = [{"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, **form} for form in forms]
        properties["prompt"]["anyOf"] = [text, *lists]


def _add_form_limits(properties: dict[str, Any]) -> None:
    """Of ``structured_outputs``; that exactly one of its forms is given the descriptions say."""
    text = {"minLength": 1, "maxLength": MAX_GRAMMAR_BYTES}
    for name in ("json", "regex", "grammar", "whitespace_pattern"):
        for branch in _branches(properties[name]):
            if branch.get("type") == "string":
                branch |= text
    for branch in _branches(properties["choice"]):
        if branch.get("type") == "array":
            branch |= {"items": {"type": "string", **text}, "minItems": 1, "maxItems": MAX_CHOICE_TEXTS}


def _branches(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from schema.get("anyOf", [schema])
