"""Replays against the real engine on the CPU, and against themselves without stretches."""

from __future__ import annotations

import itertools
import logging
import random
import statistics
import time

import pytest

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams, make_request
from moe_runtime.engine.scheduler import SchedulerConfig
from moe_runtime.planner import cpu_times
from moe_runtime.planner.calibration import base_of
from moe_runtime.planner.cost_model import Topology
from moe_runtime.planner.cpu_cost import cost_model
from moe_runtime.planner.hardware import load_hardware, read_hardware
from moe_runtime.planner.replay import Failure, Layout, ReplicaReplay, Turns
from moe_runtime.planner.replay_metrics import ReplayMetrics
from moe_runtime.planner.shape_configs import load_shape
from moe_runtime.planner.trace import Stream, TraceRequest, stream_of
from moe_runtime.server.affinity import PrefixAffinity

SHAPE = load_shape("builtin")
CASES = {
    # requests, running at once, tokens of a step, blocks, arrivals by step, overlap
    "closed": (8, 6, 96, 60, 0, "off"),
    "preempts": (9, 8, 64, 9, 0, "off"),
    "arrivals": (9, 5, 64, 9, 20, "off"),
    "overlaps": (9, 6, 96, 8, 12, "on"),
}


def layout(num_blocks, max_num_seqs=8, budget=96, *, ep_size=1, overlaps=False, gpu="cpu"):
    return Layout(
        model=cost_model(SHAPE, load_hardware(gpu), Topology(ep_size=ep_size)),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
        num_kv_blocks=num_blocks,
        max_total_tokens=min(SHAPE.max_model_len, 64 * num_blocks),
        overlaps=overlaps,
    )


def some_requests(count, latest=0, seed=0, longest=230, most_output=90):
    """With prefixes in common, in order of arrival."""
    draw = random.Random(seed)
    arrivals = sorted(draw.randint(0, latest) for _ in range(count))
    found = []
    for number, arrival in enumerate(arrivals):
        shared, rest = draw.choice((0, 64, 130)), draw.randint(1, longest - 130)
        streams = (Stream(shared, shared), stream_of("test", number, rest)) if shared else ()
        streams = streams or (stream_of("test", number, rest),)
        found.append(
            TraceRequest(
                arrival=arrival,
                num_prompt_tokens=shared + rest,
                num_output_tokens=draw.randint(1, most_output),
                streams=streams,
            )
        )
    return found


def unshared(number, num_prompt_tokens, num_output_tokens):
    """At once, with no prefix in common."""
    return TraceRequest(
        arrival=0,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        streams=(stream_of("unshared", number, num_prompt_tokens),),
    )


def replayed(where, requests, *, by_step=False, skips=True, failures=(), router=None, slo=(None, None)):
    metrics = ReplayMetrics(*slo)
    router = router or (lambda one: Turns(one.num_groups))
    replay = ReplicaReplay(where, router, metrics, by_step=by_step, failures=failures, skips=skips)
    replay.run(requests)
    return metrics


def counts(metrics):
    return (
        metrics.num_steps,
        metrics.num_preemptions,
        metrics.num_hit_tokens,
        metrics.num_queried_tokens,
        metrics.num_evictions,
        metrics.num_computed_tokens,
    )


@pytest.fixture(scope="module")
def llm():
    served = LLM("builtin", kv_cache_blocks=16)
    yield served
    served.close()


@pytest.mark.parametrize("case", CASES)
def test_steps_preemptions_and_hits_are_those_of_the_real_engine(llm, case):
    number, max_num_seqs, budget, num_blocks, latest, overlap = CASES[case]
    llm.reconfigure(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, kv_cache_blocks=num_blocks, overlap=overlap
    )
    requests = some_requests(number, latest, most_output=70)
    where = layout(num_blocks, max_num_seqs, budget, overlaps=overlap == "on")
    found = replayed(where, requests, by_step=True)
    llm.generate(
        [r.prompt_ids(SHAPE.vocab) for r in requests],
        [
            SamplingParams(max_tokens=r.num_output_tokens, ignore_eos=True, seed=i)
            for i, r in enumerate(requests)
        ],
        arrival_steps=[int(r.arrival) for r in requests],
    )
    real = llm.engine.stats()
    assert counts(found) == (
        real.num_steps,
        real.num_preemptions,
        real.num_prefix_cache_hits,
        real.num_prefix_cache_queries,
        real.num_prefix_cache_evictions,
        real.num_computed_tokens,
    )
    assert found.num_finished == number
    assert found.num_hit_tokens > 0
    assert (found.num_preemptions > 0) == (case != "closed")
    # The control: other limits are another run.
    other = layout(num_blocks, 2, budget)
    assert counts(replayed(other, requests, by_step=True)) != counts(found)


@pytest.mark.parametrize("gpu", ["cpu", "h200"])
@pytest.mark.parametrize(
    ("num_blocks", "max_num_seqs"), [(200, 3), (12, 8), (30, 8)], ids=["queue", "preempts", "waits"]
)
@pytest.mark.parametrize("by_step", [True, False])
def test_stretches_change_nothing(gpu, num_blocks, max_num_seqs, by_step):
    where = layout(num_blocks, max_num_seqs, ep_size=2, overlaps=gpu != "cpu", gpu=gpu)
    requests = some_requests(50, 90 if by_step else 2, seed=num_blocks, most_output=300)
    router = lambda one: PrefixAffinity(range(one.num_groups), max_num_seqs, 64)  # noqa: E731
    fast, slow = (
        replayed(where, requests, by_step=by_step, skips=skips, router=router) for skips in (True, False)
    )
    assert counts(fast) == counts(slow)
    assert fast.end_s == pytest.approx(slow.end_s, rel=1e-12)
    assert sorted(fast.ttft) == pytest.approx(sorted(slow.ttft), rel=1e-9)
    assert sorted(fast.end_to_end) == pytest.approx(sorted(slow.end_to_end), rel=1e-9)
    assert fast.itl.count == slow.itl.count == sum(r.num_output_tokens - 1 for r in requests)


def test_a_later_turn_finds_the_earlier_one_and_its_output():
    def turn(arrival, prompt, goes_on=True, name="a"):
        return TraceRequest(
            arrival=arrival,
            num_prompt_tokens=prompt,
            num_output_tokens=64,
            streams=(stream_of("session", name, prompt),),
            goes_on=goes_on,
        )

    found = replayed(layout(40), [turn(0, 64), turn(50, 192), turn(60, 192, name="b")])
    assert found.num_hit_tokens == 64  # the last token of an output has not run: its block has no name
    found = replayed(layout(40), [turn(0, 64), turn(50, 257)])
    assert found.num_hit_tokens == 64
    found = replayed(layout(40), [turn(0, 65), turn(50, 257)])
    assert found.num_hit_tokens == 128
    found = replayed(layout(40), [turn(0, 65, goes_on=False), turn(50, 257)])
    assert found.num_hit_tokens == 64


def test_requests_wait_for_the_step_under_way_and_overlap_costs_a_step():
    early = TraceRequest(arrival=0.0, num_prompt_tokens=4, num_output_tokens=50, streams=(Stream(1, 4),))
    late = TraceRequest(arrival=0.001, num_prompt_tokens=4, num_output_tokens=2, streams=(Stream(2, 4),))
    plain, overlapping = (
        replayed(layout(40, overlaps=overlaps, gpu="h200"), [early, late]) for overlaps in (False, True)
    )
    step_s = plain.ttft[0]
    assert 0 < min(plain.ttft) < min(overlapping.ttft[:1]) + step_s
    assert overlapping.ttft[0] > plain.ttft[0]


def test_a_failure_ends_what_is_open_and_the_rest_runs_on_fewer_ranks():
    requests = some_requests(40, 3, seed=3, most_output=200)
    before, after = layout(60, ep_size=4, gpu="h200"), layout(60, ep_size=2, gpu="h200")
    failure = Failure(at_s=1.0005, down_s=0.5, layout=after)
    found = replayed(before, requests, failures=[failure])
    assert found.num_arrived == 40
    assert 0 < found.num_failed < 40
    assert found.num_finished == 40 - found.num_failed
    [restart] = found.restarts
    assert (restart["at_s"], restart["down_s"], restart["ep_size"]) == (1.0005, 0.5, 2)
    assert counts(replayed(before, requests, failures=[failure], skips=False)) == counts(found)
    gone = replayed(before, requests, failures=[Failure(at_s=1.0005, down_s=9, layout=None)])
    assert gone.num_finished + gone.num_failed == 40
    assert gone.num_finished == sum(r.arrival <= 1 for r in requests) - gone.restarts[0]["failed_requests"]
    assert gone.restarts[0]["ep_size"] is None


def test_goodput_counts_those_within_both_limits():
    requests = some_requests(20, 2, seed=5)
    every = replayed(layout(60), requests)
    assert every.num_good == 20
    some = replayed(layout(60), requests, slo=(statistics.median(every.ttft), None))
    assert some.num_good == 10
    assert replayed(layout(60), requests, slo=(None, 1e-9)).num_good == sum(
        r.num_output_tokens == 1 for r in requests
    )


def test_too_long_requests_are_rejected_and_nothing_waits_for_them():
    long = TraceRequest(arrival=0.0, num_prompt_tokens=300, num_output_tokens=30, streams=(Stream(1, 300),))
    found = replayed(layout(5), [long, *some_requests(3)])
    assert (found.num_rejected, found.num_finished, found.num_arrived) == (1, 3, 4)


def real_steps(llm, batch):
    """CPU seconds of each step of a closed batch, and the steps that bring each request's first and last token."""
    llm.flush_cache()
    for i, r in enumerate(batch):
        params = SamplingParams(max_tokens=r.num_output_tokens, ignore_eos=True, seed=i)
        llm.engine.add_request(make_request(str(i), r.prompt_ids(SHAPE.vocab), params, llm.limits))
    first, last, seconds = {}, {}, []
    while llm.engine.scheduler.num_unfinished:
        start = time.thread_time()
        _, outputs = llm.engine.step()
        seconds.append(time.thread_time() - start)
        for output in outputs:
            first.setdefault(output.request_id, len(seconds))
            last[output.request_id] = len(seconds)
    return seconds, first, last


def real_tpot(batch, runs):
    """Mean TPOT of a closed batch, from the means of each of its steps over runs, which are alike."""
    _, first, last = runs[0]
    clock = [0.0, *itertools.accumulate(statistics.fmean(t) for t in zip(*(r[0] for r in runs), strict=True))]
    return statistics.fmean(
        (clock[last[str(i)]] - clock[first[str(i)]]) / (r.num_output_tokens - 1)
        for i, r in enumerate(batch)
        if r.num_output_tokens > 1
    )


@pytest.mark.slow
def test_mean_tpot_is_within_15_percent_of_a_real_run(llm, monkeypatch):
    """In CPU seconds of the thread: the machine may be busy. Calibration by parts alone and real runs take turns: what
    else runs on the machine slows them down alike, by 20 % and more, and changes within seconds."""
    monkeypatch.setattr(cpu_times, "LAUNCHES", 6)
    requests = some_requests(32, seed=1)
    cases = {
        # requests, running at once, tokens of a step
        "1 request": (requests[:1], 16, 256),
        "8 requests": (requests[:8], 16, 256),
        "32 requests": (requests, 16, 256),
        "4 at once": (requests[20:28], 4, 256),
        "equally long": ([unshared(i, 128, 60) for i in range(16)], 16, 256),
        "long": ([unshared(i, 400 + 40 * i, 60) for i in range(5)], 8, 128),
    }
    calibrations, runs = [], {name: [] for name in cases}
    for _ in range(6):
        llm.reconfigure(max_num_seqs=16, max_num_batched_tokens=256, kv_cache_blocks=120, overlap="off")
        calibrations.append(cpu_times.cpu_kernel_times(llm, SHAPE))
        for name, (batch, max_num_seqs, budget) in cases.items():
            llm.reconfigure(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
            runs[name].append(real_steps(llm, batch))
    raw = base_of("cpu")
    raw["kernels"] = [
        rows[0] | {"us": statistics.fmean(row["us"] for row in rows)}
        for rows in zip(*calibrations, strict=True)
    ]
    errors = {}
    for name, (batch, max_num_seqs, budget) in cases.items():
        where = Layout(
            model=cost_model(SHAPE, read_hardware(raw), Topology(ep_size=1)),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget),
            num_kv_blocks=120,
            max_total_tokens=SHAPE.max_model_len,
        )
        predicted = replayed(where, batch).latency()["tpot_s"]["mean"]
        errors[name] = predicted / real_tpot(batch, runs[name]) - 1
        logging.getLogger(__name__).info("%s: %+.1f %%", name, 100 * errors[name])
    assert all(abs(error) <= 0.15 for error in errors.values()), {k: f"{v:+.1%}" for k, v in errors.items()}
