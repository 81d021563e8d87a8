"""Messages between front end and ranks survive the wire, fp32 logprobs to the last bit."""

from __future__ import annotations

import msgspec
import pytest
import torch

from moe_runtime.engine.messages import (
    AbortRequest,
    AddRequest,
    Drain,
    MoveExperts,
    MoveResult,
    PlacementReport,
    RankReady,
    RankReport,
    RankStats,
    RearrangementStats,
    SequenceOutput,
    TokenLogprobs,
    Wake,
    decode_rank_message,
    decode_report,
    encode,
)
from moe_runtime.engine.request import Request, SamplingParams

REQUEST = Request(request_id="r", prompt_ids=(1, 2), params=SamplingParams(stop=("x",), seed=-(2**63)))


@pytest.mark.parametrize(
    "message",
    [
        AddRequest(1, REQUEST),
        AbortRequest(2, "r", 3),
        Wake(2**40),
        Drain(4, abort=True),
        MoveExperts(5, 6),
        MoveExperts(5, 7, b"\x00\xff"),
    ],
)
def test_messages_to_ranks_come_back_equal(
    message: AddRequest | AbortRequest | Wake | Drain | MoveExperts,
) -> None:
    assert decode_rank_message(encode(message)) == message


def test_reports_keep_every_bit_of_fp32_logprobs() -> None:
    values = tuple((-torch.rand(50, generator=torch.Generator().manual_seed(0)) * 30).tolist())
    entry = TokenLogprobs(values[0], tuple(range(49)), values[1:])
    output = SequenceOutput("r", 1, (7,), (entry,), (None, entry), "stop", 7)
    report = RankReport(3, 9, (output,), RankStats(num_running=2))
    assert decode_report(encode(report)) == report
    report = RankReport(
        0,
        9,
        (),
        RankStats(),
        rearrangement=RearrangementStats(outcomes={"failed": 2}, last_fault="failed: x", stall_s=0.5),
        placement=PlacementReport(b"\x01\x00\x00\x00", (3, 0)),
        moves=(MoveResult(1, "failed", "x"),),
    )
    assert decode_report(encode(report)) == report
    assert decode_report(encode(RankReady(0, 1, {"a": None, "b": 1.5}))) == RankReady(
        0, 1, {"a": None, "b": 1.5}
    )


@pytest.mark.parametrize("data", [b"", b"\x80", b"junk", encode(Wake(1))])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_report(data)
