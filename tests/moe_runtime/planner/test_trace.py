"""Token ids of streams: who shares what."""

from __future__ import annotations

import pytest

from moe_runtime.planner.trace import FILLER, Stream, TraceRequest, stream_of, summarise


@pytest.mark.parametrize("vocab_size", [3, 256, 512, 151936])
def test_streams_differ_and_a_longer_one_begins_with_a_shorter_one(vocab_size):
    streams = [Stream(number, 64) for number in (0, 1, 511, 512, 2**64 - 1)]
    found = [tuple(stream.ids(vocab_size)) for stream in streams]
    assert len(set(found)) == len(found)
    for stream, ids in zip(streams, found, strict=True):
        assert len(ids) == 64
        assert all(0 <= token < vocab_size for token in ids)
        assert tuple(Stream(stream.number, 100).ids(vocab_size)) == ids + (FILLER,) * 36
        assert tuple(Stream(stream.number, 3).ids(vocab_size)) == ids[:3]


def test_names_of_different_kinds_are_different_streams():
    assert stream_of("prefix", "a", 5).number != stream_of("session", "a", 5).number
    assert stream_of("prefix", "a", 5) == stream_of("prefix", "a", 5)


def test_a_prompt_is_its_streams_one_after_the_other():
    both = TraceRequest(
        arrival=0, num_prompt_tokens=20, num_output_tokens=1, streams=(Stream(7, 12), Stream(8, 8))
    )
    assert both.prompt_ids(512) == (*Stream(7, 12).ids(512), *Stream(8, 8).ids(512))
    given = TraceRequest(arrival=0, num_prompt_tokens=2, num_output_tokens=1, ids=(4, 5))
    assert given.prompt_ids(512) == (4, 5)
    found = summarise([both, given], by_step=True)
    assert (found.num_requests, found.num_prompt_tokens, found.num_output_tokens, found.longest) == (
        2,
        22,
        2,
        21,
    )
