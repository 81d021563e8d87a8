"""Replays against the real engine on the CPU, and against themselves without stretches."""

from __future__ import annotations

import random

import pytest

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.scheduler import SchedulerConfig
from moe_runtime.planner.cost_model import Topology
from moe_runtime.planner.cpu_cost import cost_model
from moe_runtime.planner.hardware import load_hardware
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


def replayed(where, requests, *, by_step=False, skips=True, failures=(), router=None, slo=(None, None)):
    metrics = ReplayMetrics(*slo)
    router = router or (lambda one: Turns(one.num_groups))
    replay = ReplicaReplay(
        where, router, metrics, by_step=by_step, failures=failures, skips=skips
    )
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
        [SamplingParams(max_tokens=r.num_output_tokens, ignore_eos=True, seed=i) for i, r in enumerate(requests)],
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
    # The control: one block less, or no overlap, is another run.
    other = layout(num_blocks - 1 if case == "preempts" else num_blocks, max_num_seqs - 1, budget)
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
