"""``/metrics`` of a server on two ranks says what its requests did, and asking changes nothing."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_runtime.engine.llm import LLM
from tests.servers import RunningServer, running_server

pytestmark = pytest.mark.xdist_group("servers")

PROBE = {"prompt": "HAMLET\nWhat a piece of work is", "max_tokens": 32, "seed": 7, "logprobs": 5}
Samples = dict[tuple[str, ...], float]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(2, "--kv-cache-blocks", "4") as running:
        yield running


def _scrape(server: RunningServer) -> Samples:
    text = httpx.get(f"{server.url}/metrics").raise_for_status().text
    return {
        (sample.name.removeprefix("moe_runtime_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _gained(before: Samples, after: Samples, name: str, *labels: str) -> float:
    return after[(name, *labels)] - before[(name, *labels)]


def _idle(server: RunningServer) -> Samples:
    """Metrics once the ranks have told that nothing is left."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    end_s = time.monotonic() + 20
    samples = _scrape(server)
    while any(value for key, value in samples.items() if key[0] in gauges):
        assert time.monotonic() < end_s, samples
        time.sleep(0.1)
        samples = _scrape(server)
    assert all((gauge, rank) in samples for gauge in gauges for rank in "01")
    return samples


def test_counters_and_histograms_are_what_requests_did(server: RunningServer) -> None:
    before = _idle(server)
    start_s = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        # On each rank four sequences that come to two blocks each, on four blocks: some are preempted.
        calls = [
            pool.submit(server.complete, prompt="O " * 10, max_tokens=100, n=4, ignore_eos=True)
            for _ in range(2)
        ]
        calls.append(pool.submit(server.complete, prompt=["a", "b"], max_tokens=9, n=2, stop="e"))
        calls.append(pool.submit(server.complete, prompt="x", max_tokens=1))
        busy = _scrape(server)
        while not any(busy["num_requests_running", rank] for rank in "01"):
            busy = _scrape(server)
        assert any(0 < busy["kv_cache_usage_perc", rank] <= 1 for rank in "01")
        answers = [call.result() for call in calls]
    wall_s = time.monotonic() - start_s
    after = _idle(server)

    usages = [answer["usage"] for answer in answers]
    choices = [choice for answer in answers for choice in answer["choices"]]
    num_tokens = sum(usage["completion_tokens"] for usage in usages)
    assert _gained(before, after, "prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert _gained(before, after, "generation_tokens_total") == num_tokens
    for reason in ("stop", "length", "abort"):
        expected = [choice["finish_reason"] for choice in choices].count(reason)
        assert _gained(before, after, "request_success_total", reason) == expected
    assert _gained(before, after, "time_to_first_token_seconds_count") == len(choices) == 13
    assert _gained(before, after, "e2e_request_latency_seconds_count") == len(choices)
    assert _gained(before, after, "inter_token_latency_seconds_count") == num_tokens - len(choices)
    sums = [
        _gained(before, after, f"{name}_seconds_sum")
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    ]
    assert sums[0] + sums[1] == pytest.approx(sums[2], rel=0.05)
    assert all(0 < total < len(choices) * wall_s for total in sums)

    ranks: list[dict[str, float]] = []
    while ranks != (ranks := [rank["stats"] for rank in server.info()["ranks"]]):
        after = _scrape(server)  # no report came in between
    for rank, stats in enumerate(ranks):
        assert after["steps_total", str(rank)] == stats["num_steps"] > 0
        assert after["num_preemptions_total", str(rank)] == stats["num_preemptions"]
    assert sum(stats["num_preemptions"] for stats in ranks) > 0


def test_a_client_that_leaves_is_an_abort(server: RunningServer) -> None:
    before = _idle(server)
    body = {"model": "builtin", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    after = _idle(server)
    gained = [_gained(before, after, "request_success_total", r) for r in ("stop", "length", "abort")]
    assert gained == [0, 0, 1]
    assert 0 < _gained(before, after, "generation_tokens_total") < 200


def test_the_info_metric_is_the_deployment_s(server: RunningServer) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    [sample] = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "moe_runtime_info"
    ]
    info = server.info()
    expected = {name: str(info[name]) for name in ("dtype", "device", "ep_size", "tp", "invariance")}
    assert sample.labels == {**expected, "multiple_reduction": "off"}


def test_scraping_changes_no_bit(server: RunningServer) -> None:
    def answer() -> str:
        response = server.complete(**PROBE)
        return json.dumps([response["choices"], response["usage"]])

    alone = answer()
    has_ended = threading.Event()

    def scrape_on() -> int:
        num_scrapes = 0
        while not has_ended.is_set():
            _scrape(server)
            num_scrapes += 1
        return num_scrapes

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        scrapers = [pool.submit(scrape_on) for _ in range(2)]
        try:
            assert {call.result() for call in [pool.submit(answer) for _ in range(6)]} == {alone}
        finally:
            has_ended.set()
        assert all(scraper.result() > 0 for scraper in scrapers)


def test_experts_over_http_are_those_of_one_process_and_every_pair_is_counted(server: RunningServer) -> None:
    prompts = [PROBE["prompt"], "To be", "a" * 200]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        calls = [
            pool.submit(server.complete, **{**PROBE, "prompt": p}, return_routed_experts=True)
            for p in prompts
        ]
        choices = [call.result()["choices"][0] for call in calls]
    llm = LLM()
    params = replace(llm.default_sampling_params(), max_tokens=32, seed=7, return_routed_experts=True)
    for choice, result in zip(choices, llm.generate(prompts, params), strict=True):
        routing = result.outputs[0].routing
        assert routing is not None
        assert choice["text"] == result.outputs[0].text
        assert choice["routed_experts"] == routing.document()
    resolved = server.info()["resolved"]
    of_row = resolved["num_experts_per_tok"] * len(resolved["moe_layer_ids"])
    samples = _idle(server)
    end_s = time.monotonic() + 20
    while _sum(samples, "routed_pairs_total") != of_row * _sum(samples, "computed_tokens_total"):
        assert time.monotonic() < end_s, samples
        time.sleep(0.1)
        samples = _scrape(server)
    assert 0.5 <= samples["expert_balancedness",] <= 1


def _sum(samples: Samples, name: str) -> float:
    return sum(samples[name, rank] for rank in "01")


def test_server_info_holds_the_resolved_configuration_and_every_rank(server: RunningServer) -> None:
    info = server.info()
    assert (info["invariance"], info["multiple_reduction"]) == ("topology", False)
    assert info["multiple_reduction_reason"]
    assert info["system_fingerprint"].startswith("fp_")
    assert info["device_architecture"].startswith("cpu ")
    assert info["resolved"]["kv_cache_blocks"] == 4
    assert info["resolved"]["max_model_len"] == info["limits"]["max_model_len"]
    assert info["http"]["api_key"] is None
    with concurrent.futures.ThreadPoolExecutor(6) as pool:  # more than one rank takes at a time
        list(pool.map(lambda _: server.complete(prompt="x", max_tokens=40, ignore_eos=True), range(6)))
    end_s = time.monotonic() + 20
    while not all(row["num_computed_tokens"] for row in info["ranks"]) and time.monotonic() < end_s:
        time.sleep(0.1)  # a rank reports about once a second
        info = server.info()
    for rank, row in enumerate(info["ranks"]):
        assert (row["rank"], row["kv_blocks"], row["device"]) == (rank, 4, "cpu")
        assert row["phase"] in ("idle", "running")
        assert row["num_computed_tokens"] > 0
