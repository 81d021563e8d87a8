"""Messages of the watch survive the wire, and nothing else is taken for one."""

from __future__ import annotations

import pickle

import msgspec
import pytest

from moe_runtime.engine.messages import Wake, encode
from moe_runtime.server.processes import ProcessId
from moe_runtime.server.watch_messages import (
    Goodbye,
    LastWords,
    Pulse,
    Sign,
    Verdict,
    decode_rank_watch_message,
    decode_watch_message,
    encode_watch_message,
)

PROCESS = ProcessId(pid=7, start_ticks=9, host="here")
TO_FRONT_END = [
    Pulse(rank=1, process=PROCESS, phase="scheduling", step=3, step_s=0.5),
    LastWords(rank=1, reason="ends", culprit=0),
    Goodbye(rank=2),
]
TO_RANKS = [Sign(process=PROCESS), Verdict(reason="over", rank=1, process=PROCESS), Verdict(reason="over")]


def test_messages_come_back_as_they_were() -> None:
    assert [decode_watch_message(encode_watch_message(m)) for m in TO_FRONT_END] == TO_FRONT_END
    assert [decode_rank_watch_message(encode_watch_message(m)) for m in TO_RANKS] == TO_RANKS


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", pickle.dumps({"rank": 0}), encode(Wake(1)), encode_watch_message(TO_RANKS[0])],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_watch_message(data)
