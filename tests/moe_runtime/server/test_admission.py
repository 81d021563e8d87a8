"""Admission: what counts as queued, what is refused, when to come back; and the same over HTTP."""

from __future__ import annotations

import concurrent.futures

import pytest

from moe_runtime.engine.messages import RankStats
from moe_runtime.engine.request import SamplingParams, make_request
from moe_runtime.server.admission import MAX_RETRY_AFTER_S, WINDOW_S, Admission, Rate
from moe_runtime.server.client import RankState
from moe_runtime.server.errors import RETRY_AFTER_S, ApiError
from tests.moe_runtime.server.conftest import wait_until
from tests.moe_runtime.server.fake_rank import LIMITS


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def rank(num_sequences=0, **stats):
    return RankState(pid=1, info={}, last_seen=0.0, stats=RankStats(**stats), num_sequences=num_sequences)


def call(*lengths, n=1):
    params = SamplingParams(max_tokens=4, seed=1, n=n)
    return [make_request(f"r{i}", [1] * length, params, LIMITS) for i, length in enumerate(lengths)]


def admission(make_config, ranks, *, clock=None, **config):
    fields = {"max_num_seqs": 4, "max_queued_seqs": 3, **config}
    return Admission(make_config(**fields), dict(enumerate(ranks)), clock or Clock())


def refusal(gate, requests=None):
    with pytest.raises(ApiError) as raised:
        gate.check(requests)
    assert (raised.value.status, raised.value.type) == (429, "overloaded_error")
    assert int(raised.value.headers["Retry-After"]) >= 1
    return raised.value


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([rank(4), rank(4)], 0),
        ([rank(6), rank(4)], 2),
        ([rank(6), rank(1)], 2),
        ([rank(3, num_waiting=2), rank(4)], 2),  # they wait for KV blocks, not for a place
        ([rank(1, num_waiting=5)], 1),  # an old report: the others have been aborted since
        ([rank(0, num_waiting=5)], 0),
    ],
)
def test_queued_are_those_past_the_places_and_those_that_the_scheduler_reports(make_config, ranks, expected):
    assert admission(make_config, ranks).num_queued == expected


def test_only_ranks_that_schedule_count(make_config):
    gate = admission(make_config, [rank(5), rank(99), rank(5), rank(99)], world_size=4, tp=2)
    assert gate.num_queued == 2


def test_a_call_is_refused_whole_where_the_queue_would_pass_its_bound(make_config):
    gate = admission(make_config, [rank(5), rank(4)])  # one is queued, three may be
    gate.check()
    gate.check(call(1, 1))
    gate.check(call(1, n=2))
    for requests in (call(1, 1, 1), call(1, n=3), call(1, 1, n=2)):
        error = refusal(gate, requests)
        assert error.code == "queue_full"
        assert "1 sequences wait" in error.message
        assert "max_queued_seqs (3)" in error.message
    assert refusal(admission(make_config, [rank(11)])).code == "queue_full"


def test_free_places_of_a_rank_count_unless_its_sequences_wait_for_blocks(make_config):
    requests = call(1, 1, 1, 1)
    admission(make_config, [rank(5), rank(2)]).check(requests)
    assert refusal(admission(make_config, [rank(5), rank(2, num_waiting=1)]), requests)


def test_no_call_is_too_large_while_nothing_is_queued(make_config):
    gate = admission(make_config, [rank(4), rank(4)], max_queued_seqs=0, max_queued_tokens=0)
    gate.check(call(*[4000] * 50, n=100))
    gate = admission(make_config, [rank(5), rank(4)], max_queued_seqs=0, max_queued_tokens=0)
    assert refusal(gate)


def test_pending_prompt_tokens_are_bounded_and_each_choice_counts(make_config):
    gate = admission(make_config, [rank(5), rank(4)], max_queued_seqs=100, max_queued_tokens=50)
    gate.on_start(9, 40)
    gate.check(call(10))
    gate.check(call(5, n=2))
    error = refusal(gate, call(5, 1, n=2))
    assert error.code == "queued_tokens"
    assert "40 prompt tokens are pending, 12 more" in error.message
    gate.on_first_output(10)
    gate.check(call(5, 1, n=2))


def test_retry_after_is_the_excess_over_the_rate_of_sequences_that_end(make_config):
    clock = Clock()
    gate = admission(make_config, [rank(4 + 3)], clock=clock)
    gate.on_start(100, 1000)
    clock.now_s += 10
    gate.on_end(5)
    assert refusal(gate).headers["Retry-After"] == "2"  # one too many, half a sequence a second
    assert refusal(gate, call(1, 1, n=3)).headers["Retry-After"] == "12"
    gate.on_end(95)
    assert refusal(gate, call(1, 1, n=3)).headers["Retry-After"] == "1"


def test_retry_after_of_tokens_is_by_the_rate_of_first_outputs(make_config):
    clock = Clock()
    gate = admission(make_config, [rank(5)], clock=clock, max_queued_seqs=100, max_queued_tokens=100)
    gate.on_start(10, 300)
    clock.now_s += 4
    gate.on_first_output(80)
    assert refusal(gate, call(80)).headers["Retry-After"] == "10"  # 220 + 80 - 100 at 20 a second


def test_a_rate_forgets_and_starts_anew_and_says_how_long_nothing_has_left():
    rate = Rate()
    rate.start(100.0)
    assert rate.seconds_for(5, 102.0) == RETRY_AFTER_S
    assert rate.seconds_for(5, 118.0) == 18.0
    rate.add(110.0, 7)
    rate.add(110.9, 3)
    assert rate.seconds_for(5, 120.0) == 10.0
    rate.add(200.0, 30)
    assert rate.seconds_for(5, 200.0) == 5 * WINDOW_S / 30, "what left long ago is not in the rate"
    assert len(rate._amounts) == 1
    rate.start(300.0)
    assert rate.seconds_for(1, 301.0) == RETRY_AFTER_S


def test_retry_after_is_never_absurd(make_config):
    clock = Clock()
    gate = admission(make_config, [rank(5)], clock=clock, max_queued_seqs=0)
    gate.on_start(1000, 1)
    clock.now_s += 20
    gate.on_end(1)
    assert refusal(gate, call(*[1] * 500)).headers["Retry-After"] == str(MAX_RETRY_AFTER_S)


def test_over_http_the_one_too_many_gets_a_429_and_the_others_their_answers(start_server):
    server = start_server(max_num_seqs=2, max_queued_seqs=3)
    bodies = [{"model": "m", "prompt": f"p{i}", "max_tokens": 9, "seed": i} for i in range(7)]
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    expected = [server.http.post("/v1/completions", json=body).json()["choices"] for body in bodies]
    server.ranks.hold.set()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(server.http.post, "/v1/completions", json=body) for body in bodies]
        wait_until(lambda: server.ranks.num_sequences == 7)  # four run, three wait
        refused = [
            server.http.post("/v1/completions", json={**bodies[0], "stream": stream})
            for stream in (False, True)
        ]
        refused.append(server.http.post("/v1/chat/completions", json=chat))
        for response in refused:
            assert response.status_code == 429
            error = response.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("overloaded_error", None, "queue_full")
            assert int(response.headers["retry-after"]) >= 1
        bad = server.http.post("/v1/completions", json={**bodies[0], "temperature": "hot"})
        assert bad.status_code == 400, "a bad request is told so, full or not"
        assert server.http.get("/health/ready").status_code == 200
        assert server.ranks.num_sequences == 7
        server.ranks.hold.clear()
        assert [future.result().json()["choices"] for future in running] == expected
    assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
    text = server.http.get("/metrics").text
    assert 'moe_runtime_requests_refused_total{reason="queue_full"} 3.0' in text
    assert 'moe_runtime_requests_refused_total{reason="queued_tokens"} 0.0' in text


def test_over_http_choices_and_prompts_count_and_what_leaves_makes_room(start_server):
    server = start_server(max_num_seqs=2, max_queued_seqs=4)
    server.ranks.hold.set()
    body = {"model": "m", "prompt": ["a", "b"], "n": 3, "max_tokens": 4, "stream": True}
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.http.post, "/v1/completions", json=body)
        wait_until(lambda: server.ranks.num_sequences == 6)  # two of them wait
        one_too_many = server.http.post("/v1/completions", json={**body, "prompt": "a"})
        assert one_too_many.status_code == 429
        assert "2 sequences wait, 3 more would pass max_queued_seqs (4)" in one_too_many.text
        second = pool.submit(server.http.post, "/v1/completions", json={**body, "prompt": "a", "n": 2})
        wait_until(lambda: server.ranks.num_sequences == 8)
        server.ranks.hold.clear()
        assert first.result().text.count('"finish_reason":"length"') == 6
        assert second.result().text.count('"finish_reason":"length"') == 2
    assert server.http.post("/v1/completions", json=body).status_code == 200
