"""``/flush_cache`` and ``/kv_events`` over fake ranks, and the counts that they lead to."""

from __future__ import annotations

import json

import pytest

from moe_runtime.engine.kv_events import BlockRemoved
from moe_runtime.engine.messages import FlushCache, Wake


@pytest.fixture(scope="module")
def server(make_config):
    from tests.moe_runtime.server.conftest import RunningServer

    running = RunningServer(make_config(kv_events=True))
    yield running
    running.close()


@pytest.mark.parametrize("body", [b"", b"{}", b" {} "])
def test_a_flush_goes_to_rank_0_and_is_answered_when_all_have_made_it(server, body):
    before = len(server.ranks.messages(FlushCache))
    response = server.http.post("/flush_cache", content=body)
    assert (response.status_code, response.json()) == (200, {"status": "flushed"})
    messages = server.ranks.messages(FlushCache)
    assert len(messages) == before + 1
    assert messages[-1] in server.ranks.ranks[0].received
    assert any(isinstance(m, Wake) and m.epoch == messages[-1].epoch for m in server.ranks.ranks[1].received)


@pytest.mark.parametrize("body", [b'{"a": 1}', b"[]", b"null", b"x"])
def test_a_flush_takes_no_fields(server, body):
    response = server.http.post("/flush_cache", content=body)
    assert response.status_code == 400
    assert "must be empty" in response.json()["error"]["message"]


def test_cached_tokens_are_in_usage_once_per_prompt(server):
    server.ranks.num_cached_tokens = 5
    answer = server.complete(prompt=["Hello", "You there"], n=3, max_tokens=7)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 10}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.stream(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=7,
        n=2,
        stream_options=options,
    )
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    counts = [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    server.ranks.num_cached_tokens = 0


@pytest.mark.parametrize(
    ("field", "value"), [("cache_salt", ""), ("cache_salt", 5), ("cache_prompt", 1), ("cache_prompt", "no")]
)
def test_bad_cache_fields_are_named(server, field, value):
    body = {"model": "m", "prompt": "Hello", field: value}
    response = server.http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_cache_fields_reach_the_rank(server):
    server.complete(prompt="Hello", cache_salt="a", cache_prompt=False)
    from moe_runtime.engine.messages import AddRequest

    params = server.ranks.messages(AddRequest)[-1].request.params
    latest = [m.request.params for m in server.ranks.messages(AddRequest)]
    assert any((p.cache_salt, p.cache_prompt) == ("a", False) for p in latest), params


def test_block_events_are_streamed_and_can_be_taken_up_again(server):
    server.ranks.kv_events = (BlockRemoved(b"\x01"), BlockRemoved(b"\x02"))
    with server.http.stream("GET", "/kv_events") as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in response.iter_lines() if line.startswith("data"))
        found = [json.loads(next(lines)[6:]) for _ in range(2)]
    assert [event["digest"] for event in found] == ["01", "02"]
    for headers, query in (({"Last-Event-ID": "1"}, ""), ({}, "?after=1")):
        with server.http.stream("GET", f"/kv_events{query}", headers=headers) as response:
            lines = (line for line in response.iter_lines() if line and not line.startswith(":"))
            assert next(lines) == "id: 2"


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", "after=", "after=99999999999999999999", "after=1.5"]
)
def test_a_bad_number_is_refused(server, query):
    response = server.http.get(f"/kv_events?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "after"


def test_block_events_are_off_unless_asked_for(start_server):
    response = start_server().http.get("/kv_events")
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "kv_events_off"
