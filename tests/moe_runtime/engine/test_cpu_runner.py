"""Steps in a thread: the same results as steps to their end, whatever ends, waits or moves meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moe_runtime.engine.cpu_runner import CpuRunner
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.messages import SequenceOutput
from moe_runtime.engine.request import SamplingParams, make_request
from moe_runtime.engine.step_thread import step_thread_ident
from moe_runtime.layers.decoder import Decoder
from tests.checkpoints import tiny_config, write_checkpoint
from tests.mixed_requests import bits, mixed_params, random_prompts
from tests.ranks import RankContext

LENGTHS = (5, 64, 130, 63, 1, 65, 20, 100)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3_moe"))


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    llm = LLM(str(model), max_num_seqs=6, max_num_batched_tokens=96, overlap="on")
    yield llm
    llm.close()


def generate(llm: LLM, overlap: str, kv_cache_blocks: int) -> tuple[list[object], int]:
    """Mixed requests that arrive one after another, some with several choices; and how many were preempted."""
    llm.reconfigure(overlap=overlap, kv_cache_blocks=kv_cache_blocks)  # type: ignore[arg-type]
    assert isinstance(llm.engine, Engine)
    assert llm.engine.runner.overlaps is (overlap == "on")
    params = mixed_params(len(LENGTHS), 30)
    params = [replace(p, n=2, prompt_logprobs=None) if i % 4 == 1 else p for i, p in enumerate(params)]
    results = llm.generate(
        random_prompts(1, LENGTHS), params, arrival_steps=[2 * i for i in range(len(LENGTHS))]
    )
    return [bits(result) for result in results], llm.engine.stats().num_preemptions


@pytest.mark.parametrize("kv_cache_blocks", [60, 5])
def test_overlap_changes_no_bit(llm: LLM, kv_cache_blocks: int) -> None:
    expected, num_preemptions = generate(llm, "off", kv_cache_blocks)
    assert (num_preemptions > 0) is (kv_cache_blocks == 5)
    actual, _ = generate(llm, "on", kv_cache_blocks)
    assert actual == expected


def test_control_a_token_of_another_row_is_seen(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = generate(llm, "on", 60)
    unknown = CpuRunner._unknown

    def crossed(self: CpuRunner, *args: object) -> list[tuple[int, int]]:
        found = unknown(self, *args)  # type: ignore[arg-type]
        rows = [row for _, row in found]
        return [(token, row) for (token, _), row in zip(found, rows[1:] + rows[:1], strict=True)]

    monkeypatch.setattr(CpuRunner, "_unknown", crossed)
    assert generate(llm, "on", 60)[0] != expected


def test_the_next_step_is_planned_while_one_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread stands still inside step 2 until step 3 has been planned and handed in."""
    forward, launch = Decoder.forward, CpuRunner.launch
    may_go, stuck = threading.Event(), threading.Event()
    num_forward, num_launched = 0, 0

    def held(self: Decoder, *args: object) -> object:
        nonlocal num_forward
        num_forward += 1
        if num_forward == 2:
            stuck.set()
            assert may_go.wait(20), "step 3 is not launched before step 2 has run"
        return forward(self, *args)  # type: ignore[arg-type]

    def counted(self: CpuRunner, *args: object, **kwargs: object) -> object:
        nonlocal num_launched
        num_launched += 1
        launched = launch(self, *args, **kwargs)  # type: ignore[arg-type]
        if num_launched == 3:
            assert stuck.wait(20)
            may_go.set()
        return launched

    monkeypatch.setattr(Decoder, "forward", held)
    monkeypatch.setattr(CpuRunner, "launch", counted)
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    assert num_forward == 5


def test_aborts_in_flight_leave_the_others_alone(llm: LLM) -> None:
    """Requests and single choices are aborted while a step that holds them runs; their blocks go to others at once."""
    llm.reconfigure(overlap="on", kv_cache_blocks=12)
    engine = llm.engine
    assert isinstance(engine, Engine)
    params = SamplingParams(
        temperature=1.0, max_tokens=24, ignore_eos=True, logprobs=1, seed=3, cache_prompt=False
    )
    prompts = random_prompts(2, [70] * 12)

    def run(aborts: dict[int, list[str]], names: list[int]) -> dict[str, list[SequenceOutput]]:
        outputs: dict[str, list[SequenceOutput]] = {}
        for i in names:
            engine.add_request(make_request(str(i), prompts[i], params, llm.limits))
        for step in range(400):
            for name in aborts.get(step, ()):
                engine.abort(name)
            view, new = engine.step()
            for output in new:
                outputs.setdefault(output.request_id, []).append(output)
            if view.may_sleep:
                return outputs
        raise AssertionError("the engine does not come to rest")

    alone = {str(i): run({}, [i])[str(i)] for i in range(0, 12, 2)}
    rng = random.Random(4)
    aborts: dict[int, list[str]] = {}
    for i in range(1, 12, 2):
        aborts.setdefault(rng.randrange(2, 40), []).append(str(i))
    together = run(aborts, list(range(12)))
    assert {name: together[name] for name in alone} == alone
    assert engine.stats().num_free_kv_blocks == 12


def test_a_step_that_fails_is_told_and_the_next_call_runs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, seed=0)
    [expected] = llm.generate([[5, 6, 7]], params)
    forward, num_calls = Decoder.forward, 0

    def failing(self: Decoder, *args: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise OSError("the third step")
        return forward(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Decoder, "forward", failing)
    with pytest.raises(OSError, match="the third step"):
        llm.generate([[5, 6, 7]], params)
    assert llm.generate([[5, 6, 7]], params) == [expected]


def test_an_engine_that_stops_leaves_no_thread(llm: LLM) -> None:
    assert step_thread_ident() is not None
    llm.stop_engine()
    assert step_thread_ident() is None


def both_ways(context: RankContext, model: str, dispatcher: str) -> list[bool]:
    """Off, on, on while experts move; the same on all ranks."""
    llm = LLM(
        model,
        group=context.group,
        dispatcher=dispatcher,
        max_num_seqs=6,
        max_num_batched_tokens=96,
        num_redundant_experts=context.world_size,
    )
    prompts, params = random_prompts(5, LENGTHS), mixed_params(len(LENGTHS), 8)

    def run(**options: object) -> list[object]:
        return [bits(result) for result in llm.generate(prompts, params, **options)]  # type: ignore[arg-type]

    expected = run()
    llm.reconfigure(overlap="on")
    assert llm.engine.runner.overlaps
    placement = llm.placement
    equal = [run(ranks=[0] * len(prompts)) == expected, run(moves={2: None}) == expected]
    moved = llm.placement.sha256 != placement.sha256
    llm.close()
    return [*equal, moved]


@pytest.mark.parametrize(("world_size", "dispatcher"), [(8, "symmetric"), (2, "collective")])
def test_overlap_changes_no_bit_between_ranks(ranks, model: Path, world_size: int, dispatcher: str) -> None:
    assert ranks(world_size, both_ways, str(model), dispatcher) == [[True] * 3] * world_size
