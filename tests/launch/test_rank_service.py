"""A rank's loop against a front end that the test plays."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import zmq

from moe_runtime.engine.llm import LLM
from moe_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Drain,
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

    def send(self, message: AddRequest | AbortRequest | Wake | Drain) -> None:
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
