"""A sequence's counters and the seed of its choice."""

from __future__ import annotations

import pytest

from moe_runtime.engine.request import RequestLimits, SamplingParams, choice_seed, make_request
from moe_runtime.engine.sequence import Sequence

LIMITS = RequestLimits(vocab_size=16, max_model_len=64, max_kv_tokens=64, eos_token_ids=(0,))


def make(choice_idx: int = 0, **params) -> Sequence:
    given = SamplingParams(seed=11, max_tokens=5, **params)
    request = make_request("r", [4, 5, 6], given, LIMITS, bad_word_ids=lambda word: ((3,),))
    return Sequence(request, choice_idx, 7)


def test_counters_follow_the_tokens():
    s = make()
    assert (s.num_tokens, s.num_output_tokens, s.num_uncomputed_tokens) == (3, 0, 3)
    s.num_computed_tokens = 3
    s.token_ids.append(9)
    assert (s.num_tokens, s.num_output_tokens, s.num_uncomputed_tokens) == (4, 1, 1)
    s.num_computed_tokens = 0  # preempted
    assert (s.num_output_tokens, s.num_uncomputed_tokens) == (1, 4)


def test_choices_do_not_share_their_tokens():
    a, b = make(0, n=2), make(1, n=2)
    a.token_ids.append(9)
    a.block_ids.append(1)
    assert b.token_ids == [4, 5, 6]
    assert b.block_ids == []


def test_choice_zero_has_the_seed_itself_and_others_a_derived_one():
    assert make(0).seed == 11
    assert make(1).seed == choice_seed(11, 1) != 11


def test_the_prompt_is_scored_with_choice_zero_alone():
    assert make(0, prompt_logprobs=0).wants_prompt_logprobs
    assert not make(1, prompt_logprobs=0).wants_prompt_logprobs
    assert not make(0).wants_prompt_logprobs


@pytest.mark.parametrize(
    ("fields", "alone", "with_grammar"),
    [
        ({}, True, True),
        ({"frequency_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: -100.0}}, True, True),
        ({"min_tokens": 2}, True, False),
        ({"allowed_token_ids": (3, 4)}, True, False),
        ({"bad_words": ("x",)}, True, False),
        ({"forced_token_ids": (1, 2, 3, 4, 5)}, False, False),
    ],
)
def test_drafts_stand_where_no_other_mask_meets_a_grammar_s(fields, alone, with_grammar):
    sequence = make(**fields)
    assert sequence.takes_drafts is alone
    sequence.grammar = object()
    assert sequence.takes_drafts is with_grammar
