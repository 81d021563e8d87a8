"""The OpenAPI document."""

from __future__ import annotations

from moe_runtime.server.schemas import CompletionBody


def references(value):
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "$ref":
                yield item
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_the_document_shows_every_path_and_field(server):
    document = server.http.get("/openapi.json").json()
    assert set(document["paths"]) == {
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
        "/metrics",
        "/expert_placement",
    }
    schemas = document["components"]["schemas"]
    assert set(schemas["CompletionBody"]["properties"]) == set(CompletionBody.model_fields)
    assert schemas["CompletionBody"]["additionalProperties"] is False
    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert body["schema"] == {"$ref": "#/components/schemas/ChatBody"}


def test_there_is_a_page(server):
    assert server.http.get("/docs").status_code == 200
