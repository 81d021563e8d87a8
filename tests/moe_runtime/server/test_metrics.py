"""Metrics: right values, bounded labels, one registry per server."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_runtime.engine.messages import RankStats
from moe_runtime.server.client import RankState
from moe_runtime.server.metrics import CONTENT_TYPE, FINISH_REASONS, PREFIX, Metrics
from tests.moe_runtime.server.conftest import wait_until

HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
)


def parse(text):
    """``{(name without prefix, (label values)): value}``."""
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert sample.name.startswith(f"{PREFIX}_")
            key = (sample.name.removeprefix(f"{PREFIX}_"), *sample.labels.values())
            assert key not in samples
            samples[key] = sample.value
    return samples


def shown(metrics):
    return parse(metrics.exposition().decode())


def scrape(server):
    response = server.http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == CONTENT_TYPE
    return parse(response.text)


def ended(samples):
    return [samples["request_success_total", reason] for reason in FINISH_REASONS]


def rank_state(**stats):
    return RankState(pid=1, info={}, last_seen=0.0, stats=RankStats(**stats))


def test_a_sequence_is_timed_from_hand_over_to_its_last_token(make_config):
    metrics = Metrics(make_config(), {})
    sequence = metrics.start_sequence()
    start_s = sequence._start_s
    metrics.add_prompt(7)
    sequence.add_tokens([start_s + 1])
    sequence.add_tokens([])
    sequence.add_tokens([start_s + 1.5, start_s + 3])
    sequence.finish("length", start_s + 3)
    samples = shown(metrics)
    assert (samples["prompt_tokens_total",], samples["generation_tokens_total",]) == (7, 3)
    assert ended(samples) == [0, 1, 0]
    found = [(samples[f"{name}_count",], samples[f"{name}_sum",]) for name in HISTOGRAMS]
    assert [count for count, _ in found] == [1, 2, 1, 1]
    assert [total for _, total in found] == pytest.approx([1, 2, 1, 3])
    assert samples["inter_token_latency_seconds_bucket", "0.8"] == 1
    assert samples["inter_token_latency_seconds_bucket", "+Inf"] == 2


def test_a_sequence_ends_once(make_config):
    metrics = Metrics(make_config(), {})
    for end in (lambda s: s.finish("stop", s._start_s), lambda s: s.abort()):
        sequence = metrics.start_sequence()
        end(sequence)
        sequence.abort()
        sequence.finish("length", sequence._start_s)
    samples = shown(metrics)
    assert ended(samples) == [1, 0, 1]
    assert samples["e2e_request_latency_seconds_count",] == 1
    assert samples["time_to_first_token_seconds_count",] == 0
    assert samples["request_time_per_output_token_seconds_count",] == 0


def test_two_servers_of_a_process_share_nothing(make_config):
    first, second = Metrics(make_config(), {}), Metrics(make_config(), {0: rank_state(num_running=3)})
    first.add_prompt(5)
    assert shown(first)["prompt_tokens_total",] == 5
    assert shown(second)["prompt_tokens_total",] == 0
    assert ("num_requests_running", "0") not in shown(first)
    assert shown(second)["num_requests_running", "0"] == 3


def test_state_is_that_of_the_latest_reports(make_config):
    ranks = {}
    metrics = Metrics(make_config(), ranks)
    assert not [key for key in shown(metrics) if key[0] in ("num_requests_running", "steps_total")]
    ranks[1] = rank_state()
    assert shown(metrics)["kv_cache_usage_perc", "1"] == 0
    ranks[0] = rank_state(
        num_running=3,
        num_waiting=2,
        num_kv_blocks=8,
        num_free_kv_blocks=6,
        num_cached_kv_blocks=3,
        num_prefix_cache_queries=500,
        num_prefix_cache_hits=320,
        num_prefix_cache_evictions=2,
        num_preemptions=4,
        num_steps=9,
        num_computed_tokens=77,
        last_step_ms=5.0,
    )
    samples = shown(metrics)
    assert {key[0]: value for key, value in samples.items() if key[1:] == ("0",)} == {
        "num_requests_open": 0,
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.25,
        "prefix_cache_blocks": 3,
        "prefix_cache_queries_total": 500,
        "prefix_cache_hits_total": 320,
        "prefix_cache_evictions_total": 2,
        "num_preemptions_total": 4,
        "steps_total": 9,
        "last_step_seconds": 0.005,
        "computed_tokens_total": 77,
    }


def test_ranks_that_follow_another_have_no_series_of_a_scheduler(make_config):
    ranks = {rank: rank_state(num_steps=5) for rank in range(4)}
    samples = shown(Metrics(make_config(world_size=4, tp=2), ranks))
    series = {}
    for name, *labels in samples:
        if labels and labels[0] in ("0", "1", "2", "3"):
            series.setdefault(name, []).append(labels[0])
    assert series.pop("steps_total") == series.pop("last_step_seconds") == ["0", "1", "2", "3"]
    assert set(series) == {
        "num_requests_open",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_blocks",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prefix_cache_evictions_total",
        "num_preemptions_total",
        "computed_tokens_total",
    }
    assert all(found == ["0", "2"] for found in series.values())


@pytest.mark.parametrize(("enabled", "word"), [(True, "on"), (False, "off")])
def test_the_deployment_is_labels_of_one_series(make_config, enabled, word):
    info = {
        "dtype": "bfloat16",
        "device": "cuda",
        "invariance": "batch",
        "multiple_reduction": enabled,
        "multiple_reduction_reason": 'a "long" story',
    }
    metrics = Metrics(make_config(info=info, world_size=8, tp=2), {})
    families = text_string_to_metric_families(metrics.exposition().decode())
    [sample] = [s for family in families for s in family.samples if s.name == f"{PREFIX}_info"]
    assert sample.value == 1
    assert sample.labels == {
        "dtype": "bfloat16",
        "device": "cuda",
        "invariance": "batch",
        "ep_size": "8",
        "tp": "2",
        "multiple_reduction": word,
    }


def test_counters_are_what_requests_were_told(start_server):
    server = start_server()
    before = scrape(server)
    assert ended(before) == [0, 0, 0]
    assert before["kv_cache_usage_perc", "0"] == before["num_requests_waiting", "1"] == 0
    answers = [
        server.complete(max_tokens=7),
        server.complete(
            prompt=["Hello", "You there", "End!"], max_tokens=25, n=2, seed=1
        ),  # 2 end by a token
        server.complete(max_tokens=50, stop="quick", seed=3),
        server.complete(max_tokens=0, echo=True, prompt_logprobs=0, forced_token_ids=[5]),
        server.chat(max_tokens=1),
    ]
    chunks = server.stream(
        "/v1/completions",
        prompt="Hi",
        max_tokens=30,
        prompt_logprobs=0,
        stream_options={"include_usage": True},
    )
    usages = [answer["usage"] for answer in answers] + [chunks[-1]["usage"]]
    choices = [choice for answer in answers for choice in answer["choices"]]
    num_sequences = len(choices) + 1
    reasons = [choice["finish_reason"] for choice in choices] + ["length"]
    samples = scrape(server)
    assert samples["prompt_tokens_total",] == sum(usage["prompt_tokens"] for usage in usages)
    num_tokens = sum(usage["completion_tokens"] for usage in usages)
    assert samples["generation_tokens_total",] == num_tokens
    assert ended(samples) == [reasons.count("stop"), reasons.count("length"), 0]
    assert ended(samples)[0] == 3
    assert [samples[f"{name}_count",] for name in HISTOGRAMS] == [
        num_sequences,
        num_tokens - num_sequences,
        num_sequences - 2,  # all but those of a single token
        num_sequences,
    ]
    assert set(samples) == set(before), "requests add no series"


def test_a_client_that_leaves_is_an_abort_and_its_tokens_count(start_server):
    server = start_server(step_s=0.02)
    body = {"model": "m", "prompt": "Hello", "max_tokens": 4000, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: ended(scrape(server)) == [0, 0, 1])
    samples = scrape(server)
    assert samples["prompt_tokens_total",] == 5
    assert 0 < samples["generation_tokens_total",] < 4000
    assert samples["time_to_first_token_seconds_count",] == 1
    assert samples["e2e_request_latency_seconds_count",] == 0


def test_a_request_whose_time_is_over_is_an_abort_and_a_refused_one_is_nothing(start_server):
    server = start_server(request_timeout_s=0.2)
    server.ranks.hold.set()
    response = server.http.post("/v1/completions", json={"model": "m", "prompt": "a", "n": 2})
    assert response.status_code == 504
    assert server.http.post("/v1/completions", json={"model": "m", "prompt": ""}).status_code == 400
    samples = scrape(server)
    assert ended(samples) == [0, 0, 2]
    assert (samples["prompt_tokens_total",], samples["generation_tokens_total",]) == (0, 0)


def test_a_server_that_is_not_ready_has_metrics_too(start_server):
    assert ended(scrape(start_server(with_ranks=False))) == [0, 0, 0]


def test_the_api_key_is_asked_for(start_server):
    server = start_server(api_key="sk-k")
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert ended(scrape(server)) == [0, 0, 0]
