"""Rules of a sequence: they follow from its tokens alone, and from nothing else."""

from __future__ import annotations

import numpy as np

from moe_runtime.engine.request import Request, SamplingParams
from moe_runtime.engine.sequence import UNKNOWN_TOKEN, Sequence
from moe_runtime.engine.sequence_rules import SequenceRules, batch_rules
from moe_runtime.kernels.logit_rules import RowRules
from moe_runtime.kernels.schedules import Control, control

PROMPT = (3, 4, 3)


def request(bad=(), ending=(), **params) -> Request:
    params = {"seed": 1, "max_tokens": 50} | params
    return Request(
        request_id="r",
        prompt_ids=PROMPT,
        params=SamplingParams(**params),
        bad_token_ids=bad,
        ending_ids=ending,
    )


def after(made: Request, *output: int):
    rules = SequenceRules.of(made)
    return None if rules is None else rules.after([*PROMPT, *output])


def bans(made: Request, *output: int) -> list[tuple[int, int]]:
    rule = after(made, *output)
    return (
        [] if rule is None else list(zip(rule.banned_ids.tolist(), rule.banned_after.tolist(), strict=True))
    )


def test_a_request_without_rules_has_none():
    assert SequenceRules.of(request()) is None
    assert SequenceRules.of(request(logit_bias={})) is None
    assert Sequence(request(temperature=0.5, top_k=3, stop_token_ids=(1,)), 0, 0).rules_after() is None


def test_given_tokens_know_no_rules():
    assert SequenceRules.of(request(frequency_penalty=1.0, forced_token_ids=(1, 2))) is None


def test_penalties_count_the_output_and_repetition_the_prompt_too():
    made = request(frequency_penalty=0.5)
    assert after(made) is None
    rule = after(made, 7, 3, 7)
    assert (rule.output_ids.tolist(), rule.prompt_ids.tolist()) == ([7, 3, 7], [])
    made = request(repetition_penalty=1.5)
    assert (after(made).output_ids.tolist(), after(made).prompt_ids.tolist()) == ([], [3, 4])
    assert after(made, 9, UNKNOWN_TOKEN).output_ids.tolist() == [9, UNKNOWN_TOKEN]


def test_biases_and_allowed_ids_hold_at_every_token():
    made = request(logit_bias={9: 1.5, 2: -3}, allowed_token_ids=(5, 2, 5))
    for output in ((), (9,), (5, UNKNOWN_TOKEN)):
        rule = after(made, *output)
        assert dict(zip(rule.bias_ids.tolist(), rule.bias.tolist(), strict=True)) == {2: -3.0, 9: 1.5}
        assert rule.allowed_ids.tolist() == [2, 5]
        assert rule.output_ids.size == 0


def test_ending_ids_are_banned_for_the_first_min_tokens():
    made = request(min_tokens=2, ending=(8, 9))
    assert bans(made) == bans(made, UNKNOWN_TOKEN) == [(8, -1), (9, -1)]
    assert after(made, 1, 2) is None
    assert after(made, 1, UNKNOWN_TOKEN) is None


def test_the_last_token_of_a_bad_word_is_banned_where_the_output_ends_with_the_others():
    made = request(bad=((5,), (6, 7), (1, 2, 3)))
    assert bans(made) == [(5, -1)]
    assert bans(made, 6) == [(5, -1), (7, -1)]
    assert bans(made, 6, 1) == [(5, -1)]
    assert bans(made, 1, 2) == [(5, -1), (3, -1)]
    assert bans(made, 0, 1, 2) == [(5, -1), (3, -1)]
    assert bans(made, 1, 0, 2) == [(5, -1)]
    # The prompt is not searched.
    assert bans(request(bad=((3, 8),))) == []


def test_an_unknown_last_token_leaves_the_question_to_the_device():
    made = request(bad=((6, 7), (1, 2, 3)))
    assert bans(made, UNKNOWN_TOKEN) == [(7, 6)]
    assert bans(made, 1, UNKNOWN_TOKEN) == [(7, 6), (3, 2)]
    assert bans(made, 6, UNKNOWN_TOKEN) == [(7, 6)]


def test_each_row_has_its_own_rules_but_under_the_control():
    masks = [np.array([word], dtype=np.int32) for word in (1, 2, 4)]
    rules = {
        0: RowRules(allowed_mask=masks[0]),
        1: None,
        2: RowRules(frequency_penalty=0.5),
        5: RowRules(allowed_mask=masks[1], presence_penalty=0.25),
        6: RowRules(allowed_mask=masks[2]),
    }
    assert batch_rules(rules) == {row: rule for row, rule in rules.items() if rule is not None}
    with control(Control.SHIFTED_MASKS):
        shifted = batch_rules(rules)
        assert batch_rules({0: rules[0]})[0].allowed_mask is masks[0], "a row alone"
    for row, mask in zip((0, 5, 6), masks[1:] + masks[:1], strict=True):
        assert shifted[row].allowed_mask is mask
    assert shifted[2] is rules[2]
    assert shifted[5].presence_penalty == 0.25
