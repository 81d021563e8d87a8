"""Penalties, bias and masks on the CPU: the definition, element by element, a row at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moe_runtime.kernels.logit_rules import RowRules, apply_rules, apply_rules_reference, leaves_a_token
from tests.bits import assert_bits_equal
from tests.kernels.rule_cases import RULE_KINDS, hostile_logits, random_rules

VOCAB, LAST = 61, 3


def ids(*values: int):
    return np.array(values, dtype=np.int32)


def bits_of(logits: torch.Tensor) -> torch.Tensor:
    """One bit pattern for all NaNs: which of them an operation passes on is the processor's choice."""
    return torch.where(logits.isnan(), torch.nan, logits)


@pytest.mark.parametrize("kind", RULE_KINDS)
def test_rules_are_those_of_the_definition(kind):
    logits = hostile_logits(4, VOCAB)
    rules = [random_rules(kind, VOCAB, seed) for seed in range(4)]
    expected = apply_rules_reference(logits, rules, [LAST] * 4)
    before = logits.clone()
    assert_bits_equal(bits_of(apply_rules(logits, rules, [LAST] * 4)), bits_of(expected))
    assert_bits_equal(bits_of(logits), bits_of(before))
    changed = not torch.equal(bits_of(expected).nan_to_num(7), bits_of(logits).nan_to_num(7))
    assert changed == (kind != "nothing")


def test_a_rows_result_does_not_depend_on_the_other_rows():
    logits = hostile_logits(len(RULE_KINDS), VOCAB)
    rules = [random_rules(kind, VOCAB, seed) for seed, kind in enumerate(RULE_KINDS)]
    together = apply_rules(logits, rules, [LAST] * len(rules))
    for i, rule in enumerate(rules):
        assert_bits_equal(
            bits_of(apply_rules(logits[i : i + 1], [rule], [LAST])), bits_of(together[i : i + 1])
        )


def test_worked_example():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    rule = RowRules(
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
        prompt_ids=ids(0),
        output_ids=ids(1, 2, 2),
        bias_ids=ids(3),
        bias=np.array([10.0], dtype=np.float32),
    )
    [row] = apply_rules(logits, [rule], [2]).tolist()
    assert row == [1.0, -4.0 - 0.25 - 0.5, 0.5 - 0.5 - 0.5, 10.5]


def test_the_order_of_bias_and_penalty_is_the_documented_one():
    rule = RowRules(
        repetition_penalty=2.0, output_ids=ids(0), bias_ids=ids(0), bias=np.array([4.0], dtype=np.float32)
    )
    assert apply_rules(torch.tensor([[6.0]]), [rule], [0]).item() == 6.0 / 2 + 4
    assert apply_rules(torch.tensor([[6.0]]), [rule], [0]).item() != (6.0 + 4) / 2


def test_a_ban_that_follows_another_token_does_not_hold():
    rule = RowRules(banned_ids=ids(0, 1), banned_after=ids(-1, 5))
    assert apply_rules(torch.zeros(1, 3), [rule], [5]).tolist() == [[-math.inf, -math.inf, 0.0]]
    assert apply_rules(torch.zeros(1, 3), [rule], [4]).tolist() == [[-math.inf, 0.0, 0.0]]
    # A bias does not bring back what is masked.
    biased = RowRules(
        banned_ids=ids(0), banned_after=ids(-1), bias_ids=ids(0), bias=np.array([100.0], dtype=np.float32)
    )
    assert apply_rules(torch.zeros(1, 2), [biased], [1]).tolist() == [[-math.inf, 0.0]]


def test_a_mask_has_a_bit_for_each_token():
    # Bits 0, 31 and 33: tokens 0 and 31 of the first word, token 1 of the second.
    rule = RowRules(allowed_mask=np.array([-(2**31) + 1, 2], dtype=np.int32))
    logits = torch.arange(40, dtype=torch.float32)[None]
    [row] = apply_rules(logits, [rule], [0]).tolist()
    assert [v for v, x in enumerate(row) if x != -math.inf] == [0, 31, 33]
    assert [row[v] for v in (0, 31, 33)] == [0.0, 31.0, 33.0]


def test_whether_masks_leave_a_token_is_what_the_logits_say():
    for seed in range(40):
        generator = np.random.default_rng(seed)
        few = (generator.integers(0, 2**16, 2) & generator.integers(0, 2**16, 2)).astype(np.int32)
        rule = RowRules(
            allowed_mask=few if seed % 2 else None,
            allowed_ids=np.unique(generator.integers(0, VOCAB, 4)).astype(np.int32) if seed % 3 else None,
            banned_ids=generator.integers(0, 16, 12).astype(np.int32) if seed % 5 else ids(),
            banned_after=generator.choice([-1, LAST, LAST + 1], 12).astype(np.int32) if seed % 5 else ids(),
        )
        found = apply_rules(torch.zeros(1, VOCAB), [rule], [LAST])
        assert leaves_a_token(rule, LAST, VOCAB) == bool((found > -math.inf).any()), seed
    assert not leaves_a_token(RowRules(allowed_mask=np.zeros(2, dtype=np.int32)), LAST, VOCAB)
