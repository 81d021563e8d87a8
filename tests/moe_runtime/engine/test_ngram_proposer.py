"""Prompt lookup: what followed the same tokens before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.engine.ngram_proposer import LONGEST_MATCH, SHORTEST_MATCH, NgramProposer, lookup
from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.sequence import Sequence


def drafts(text: list[int], num: int = 4) -> tuple[int, ...]:
    return lookup(np.array(text, dtype=np.int32), num)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([7, 8, 9, 7, 8], (9, 7, 8, 9)),
        ([1, 2, 3, 4, 5, 6, 1, 2], (3, 4, 5, 6)),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (4, 9, 1, 2)),
        ([5, 1, 2, 3, 9, 1, 2, 4, 5, 1, 2], (3, 9, 1, 2)),
        ([6, 6, 6], (6, 6, 6, 6)),
        ([1, 2, 3], ()),
        ([1, 3, 2, 3], ()),
        ([1], ()),
        ([], ()),
    ],
    ids=[
        "repeats",
        "example",
        "latest of equal",
        "longest wins",
        "one token",
        "new",
        "one alone",
        "short",
        "empty",
    ],
)
def test_examples(text, expected):
    assert drafts(text) == expected


def by_definition(text: list[int], num: int) -> tuple[int, ...]:
    for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[len(text) - length :]:
                text = list(text)
                at = start + length
                for i in range(num):
                    text.append(text[at + i])
                return tuple(text[-num:])
    return ()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 8))
def test_every_text_by_the_definition(text, num):
    assert drafts(text, num) == by_definition(text, num)


def test_tokens_that_came_since_are_looked_at():
    params = SamplingParams(seed=0, max_tokens=40)
    sequence = Sequence(Request(request_id="a", prompt_ids=(1, 2, 3), params=params), 0, 0)
    other = Sequence(Request(request_id="b", prompt_ids=(4, 4, 4), params=params), 0, 1)
    proposer = NgramProposer()
    text = [1, 2, 3]
    for token_id in (9, 1, 2, 3, 5, 9, 1, 1, 2, 3):
        assert proposer.propose([(other, 1), (sequence, 3)]) == [(4,), drafts(text, 3)]
        text.append(token_id)
        sequence.token_ids.append(token_id)
    sequence.token_ids += [5, 9]
    assert proposer.propose([(sequence, 3)]) == [drafts([*text, 5, 9], 3)] == [(1, 1, 2)]
