"""The OpenAPI document says what the server takes."""

from __future__ import annotations

import pytest

from moe_runtime.engine.request import MAX_CHOICES, MAX_STOP_STRINGS
from moe_runtime.server.auth import OPEN_PATHS
from moe_runtime.server.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from moe_runtime.server.unsupported import INERT_FIELDS, NEUTRAL_VALUES
from tests.moe_runtime.server.conftest import RunningServer
from tests.moe_runtime.server.fake_rank import LIMITS


def references(value):
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "$ref":
                yield item
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


@pytest.fixture(scope="module")
def document(server):
    return server.http.get("/openapi.json").json()


def branch(document, body, name, kind):
    """The schema of a field for values of one JSON type."""
    schema = document["components"]["schemas"][body.__name__]["properties"][name]
    [found] = [part for part in schema.get("anyOf", [schema]) if part.get("type") == kind]
    return found


def test_the_document_shows_every_path_and_field(document):
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/tokenize",
        "/detokenize",
        "/health",
        "/health/live",
        "/health/ready",
        "/version",
        "/server_info",
        "/status",
        "/metrics",
        "/expert_load",
        "/expert_placement",
    } <= set(document["paths"])
    schemas = document["components"]["schemas"]
    foreign = {*INERT_FIELDS, *NEUTRAL_VALUES}
    for body, fields in (
        (CompletionBody, foreign),
        (ChatBody, foreign),
        (TokenizeBody, ()),
        (DetokenizeBody, ()),
    ):
        assert set(schemas[body.__name__]["properties"]) == {*body.model_fields, *fields}
        assert schemas[body.__name__]["additionalProperties"] is False
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatBody"}


def test_the_document_has_the_limits_of_the_deployment(document):
    assert branch(document, CompletionBody, "model", "string")["enum"] == ["m"]
    assert branch(document, ChatBody, "max_tokens", "integer")["maximum"] == LIMITS.max_total_tokens
    assert branch(document, ChatBody, "n", "integer")["maximum"] == MAX_CHOICES
    assert branch(document, ChatBody, "stop", "array")["maxItems"] == MAX_STOP_STRINGS
    assert branch(document, ChatBody, "temperature", "number")["maximum"] == 100
    assert branch(document, DetokenizeBody, "tokens", "array")["items"]["maximum"] == LIMITS.vocab_size - 1
    forms = document["components"]["schemas"]["CompletionBody"]["properties"]["prompt"]["anyOf"]
    assert [form["type"] for form in forms] == ["string", "array", "array", "array"]
    assert forms[2]["items"]["maximum"] == LIMITS.vocab_size - 1
    assert branch(document, TokenizeBody, "prompt", "string") == {"type": "string"}


@pytest.mark.parametrize("name", ["n", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs", "stop"])
def test_the_limits_are_those_of_the_server(server, document, name):
    """Each end of a documented range is accepted, and what lies beyond it refused."""
    schema = document["components"]["schemas"]["CompletionBody"]["properties"][name]
    for kind in ("integer", "number", "string", "array"):
        for part in [part for part in schema["anyOf"] if part["type"] == kind]:
            for value, is_allowed in _ends(part):
                response = server.http.post(
                    "/v1/completions", json={"model": "m", "prompt": "x", "max_tokens": 1, name: value}
                )
                assert response.status_code == (200 if is_allowed else 400), (name, value, response.text)


def _ends(schema):
    step = 1 if schema["type"] == "integer" else 1e-9
    for bound, sign in (("minimum", -1), ("maximum", 1)):
        if bound in schema:
            yield schema[bound], True
            yield schema[bound] + sign * step, False
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"], False
        yield schema["exclusiveMinimum"] + step, True
    if schema["type"] == "string":
        yield "a" * schema["minLength"], True
        yield "a" * (schema["minLength"] - 1), False
        yield "a" * schema["maxLength"], True
        yield "a" * (schema["maxLength"] + 1), False
    if schema["type"] == "array":
        yield ["a"] * schema["maxItems"], True
        yield ["a"] * (schema["maxItems"] + 1), False


def test_fields_of_other_servers_show_what_is_accepted(server, document):
    properties = document["components"]["schemas"]["CompletionBody"]["properties"]
    assert properties["best_of"]["enum"] == [1, None]
    assert properties["user"]["type"] == ["string", "null"]
    for name in NEUTRAL_VALUES:
        for value in properties[name].get("enum", []):
            assert server.complete(max_tokens=1, **{name: value})["choices"]


def test_every_answer_of_an_operation_is_listed(document):
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert {"400", "404", "405", "408", "500"} <= set(operation["responses"])
            assert ("requestBody" in operation) <= (
                {"413", "415", "429", "503", "504"} <= set(operation["responses"])
            )
            assert "401" not in operation["responses"]
            assert "security" not in operation, path
    content = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}


def test_the_key_is_in_the_document(make_config):
    server = RunningServer(make_config(api_key="sk-secret"))
    try:
        document = server.http.get("/openapi.json").json()
    finally:
        server.close()
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert ("401" in operation["responses"]) == ("security" in operation) == (path not in OPEN_PATHS)


def test_there_is_a_page(server):
    assert server.http.get("/docs").status_code == 200


def test_the_document_shows_the_forms_of_an_output(document):
    schemas = document["components"]["schemas"]
    for body in (CompletionBody, ChatBody):
        fields = schemas[body.__name__]["properties"]
        assert set(references([fields["response_format"], fields["structured_outputs"]])) == {
            "#/components/schemas/ResponseFormat",
            "#/components/schemas/StructuredOutputsBody",
        }
    form = schemas["StructuredOutputsBody"]["properties"]
    assert {"json", "json_object", "regex", "choice", "grammar"} <= set(form)
    texts = [part for name in ("json", "regex", "grammar") for part in form[name]["anyOf"]]
    assert sum(part.get("maxLength") == 2**17 for part in texts) == 3
    [choice] = [part for part in form["choice"]["anyOf"] if part.get("type") == "array"]
    assert (choice["minItems"], choice["maxItems"]) == (1, 4096)
    assert {"name", "schema"} <= set(schemas["JsonSchemaFormat"]["required"])


def test_both_forms_of_the_expert_load_are_in_the_document(document):
    content = document["paths"]["/expert_load"]["get"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "application/octet-stream"}
