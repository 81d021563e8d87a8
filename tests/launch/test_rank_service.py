"""A rank's loop against a front end that the test plays."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import zmq

from moe_runtime.engine.kv_events import BlockEvent, BlocksCleared, BlockStored
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Drain,
    FlushCache,
    MoveExperts,
    MoveResult,
    PlacementReport,
    RankReady,
    RankReport,
    SequenceOutput,
    Wake,
    decode_report,
    encode,
)
from moe_runtime.engine.request import SamplingParams, make_request
from moe_runtime.launch.rank_service import RankService
from moe_runtime.launch.step_clock import StepClock


class PlayedFrontEnd:
    """The front end's socket, and the rank's loop in a thread."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.clock = StepClock(slow_step_s=math.inf)
        self.num_drains = 0
        self.service = RankService(
            llm.engine, 0, f"tcp://127.0.0.1:{port}", {"x": 1}, clock=self.clock, on_drain=self._count
        )
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.service.run()

    def _count(self) -> None:
        self.num_drains += 1

    def receive(self) -> RankReady | RankReport:
        assert self.socket.poll(20_000), "no message from the rank"
        return decode_report(self.socket.recv_multipart()[1])

    def send(self, message: AddRequest | AbortRequest | Wake | Drain | MoveExperts | FlushCache) -> None:
        self.socket.send_multipart([b"rank-0", encode(message)])

    def outputs_until_idle(self) -> list[SequenceOutput]:
        outputs: list[SequenceOutput] = []
        while True:
            report = self.receive()
            assert isinstance(report, RankReport)
            outputs.extend(report.outputs)
            if outputs and report.stats.num_running == report.stats.num_waiting == 0:
                return outputs

    def end(self) -> None:
        self.send(Drain(1000, abort=True))
        self.thread.join(20)
        self.service.close()
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def played() -> Iterator[PlayedFrontEnd]:
    front_end = PlayedFrontEnd(LLM())
    yield front_end
    front_end.end()
    assert not front_end.thread.is_alive()


def _add(llm: LLM, request_id: str, epoch: int, max_tokens: int) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    return AddRequest(epoch, make_request(request_id, [5, 6, 7], params, llm.limits))


def test_a_request_is_served_and_reported_with_its_epoch(played: PlayedFrontEnd) -> None:
    ready = played.receive()
    assert isinstance(ready, RankReady)
    assert ready.info == {"x": 1}
    played.send(_add(played.llm, "a", 1, 5))
    outputs = played.outputs_until_idle()
    assert [o.request_id for o in outputs] == ["a"] * 5
    assert [o.finish_reason for o in outputs] == [None] * 4 + ["length"]
    report = played.receive()
    assert isinstance(report, RankReport)
    assert report.epoch == 1


def test_an_idle_rank_sends_heartbeats_and_does_not_step(played: PlayedFrontEnd) -> None:
    played.receive()
    reports = [played.receive() for _ in range(2)]
    assert all(isinstance(r, RankReport) and r.stats.num_steps == 0 for r in reports)


def test_an_aborted_request_is_heard_of_no_more(played: PlayedFrontEnd) -> None:
    played.receive()
    played.send(_add(played.llm, "long", 1, 900))
    while not played.llm.engine.num_generation_tokens:
        played.receive()
    played.send(AbortRequest(2, "long"))
    played.send(_add(played.llm, "next", 3, 2))
    outputs = played.outputs_until_idle()
    assert [o.request_id for o in outputs[-2:]] == ["next"] * 2
    assert outputs[-1].finish_reason == "length"


def test_drain_finishes_what_runs_and_leaves(played: PlayedFrontEnd) -> None:
    played.receive()
    played.send(_add(played.llm, "a", 1, 30))
    played.send(Drain(2))
    assert played.outputs_until_idle()[-1].finish_reason == "length"
    played.thread.join(20)
    assert not played.thread.is_alive()
    assert (played.num_drains, played.service.exit_code) == (1, 0)
    assert played.clock.number >= 30
    assert played.clock.elapsed_s == 0


def test_drain_with_abort_drops_what_runs(played: PlayedFrontEnd) -> None:
    played.receive()
    played.send(_add(played.llm, "a", 1, 900))
    played.send(Drain(2, abort=True, exit_code=143))
    played.thread.join(20)
    assert not played.thread.is_alive()
    assert played.service.exit_code == 143
    assert played.llm.engine.scheduler.num_unfinished == 0


def test_a_flush_is_reported_at_once_and_block_events_follow(played: PlayedFrontEnd) -> None:
    played.receive()
    played.llm.engine.report_kv_events()
    prompt = [5] * 130
    params = SamplingParams(max_tokens=1, seed=1)
    played.send(AddRequest(1, make_request("a", prompt, params, played.llm.limits)))
    events: list[BlockEvent] = []

    def report() -> RankReport:
        found = played.receive()
        assert isinstance(found, RankReport)
        events.extend(found.kv_events)
        return found

    while not report().outputs:
        pass
    played.send(FlushCache(2))
    while not (last := report()).stats.num_cache_flushes:
        pass
    assert [type(event) for event in events] == [BlockStored, BlockStored, BlocksCleared]
    assert (last.stats.num_cached_kv_blocks, last.epoch) == (0, 2)
    assert last.stats.num_steps == 1, "a flush runs no step"


def test_a_move_is_answered_and_shown() -> None:
    llm = LLM(dispatcher="loopback", loopback_ranks=2, rearrange_interval=1000)
    front_end = PlayedFrontEnd(llm)
    try:
        check_moves(front_end)
    finally:
        front_end.end()


def check_moves(front_end: PlayedFrontEnd) -> None:
    assert isinstance(front_end.receive(), RankReady)
    now = front_end.llm.placement.physical_to_logical_map
    reports: list[RankReport] = []

    def result_of(number: int) -> MoveResult:
        while True:
            report = front_end.receive()
            assert isinstance(report, RankReport)
            reports.append(report)
            for result in report.moves:
                assert result.request_id == number
                return result

    target = now[:, ::-1].astype("<i4").tobytes()
    front_end.send(MoveExperts(1, 7, target))
    assert result_of(7) == MoveResult(7, "succeeded")
    placements = [report.placement for report in reports if report.placement is not None]
    assert placements[-1] == PlacementReport(target, (1, 1, 1, 1))
    assert reports[-1].rearrangement is not None
    assert reports[-1].rearrangement.outcomes == {"succeeded": 1}
    front_end.send(MoveExperts(2, 8, bytes(len(target))))
    refused = result_of(8)
    assert (refused.outcome, "must hold every logical expert" in refused.reason) == ("refused", True)


def test_a_rank_whose_experts_stay_refuses_a_move(played: PlayedFrontEnd) -> None:
    assert isinstance(played.receive(), RankReady)
    played.send(MoveExperts(1, 4))
    while True:
        report = played.receive()
        assert isinstance(report, RankReport)
        if report.moves:
            break
    assert report.moves == (MoveResult(4, "refused", "experts stay here"),)
    assert report.rearrangement is None
