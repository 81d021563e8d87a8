"""Penalties, bias and masks on a GPU or in the interpreter: the CPU's bits, a row at a time."""

from __future__ import annotations

import pytest
import torch

from tests.bits import assert_bits_equal
from tests.kernels.rule_cases import RULE_KINDS, hostile_logits, random_rules
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.logit_rules_triton import RuleRows, apply_rules, apply_rules_reference  # isort: skip

LAST = 3


def bits_of(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(logits.isnan(), torch.nan, logits).cpu()


def rules_of(logits, rules, row_idx, last_ids):
    rows = RuleRows.of(rules, row_idx, DEVICE)
    assert rows.row_idx.tolist() == list(row_idx)
    return apply_rules(logits.to(DEVICE), rows, torch.tensor(last_ids, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("vocab", [96, 1024, 2500])
@pytest.mark.parametrize("kind", RULE_KINDS)
def test_bits_are_the_cpus(kind, vocab):
    logits = hostile_logits(5, vocab)
    row_idx, last_ids = [4, 0, 3], [9, 8, 7, LAST, LAST]
    rules = [random_rules(kind, vocab, seed) for seed in range(3)]
    expected = apply_rules_reference(logits, rules, row_idx, last_ids)
    assert_bits_equal(bits_of(rules_of(logits, rules, row_idx, last_ids)), bits_of(expected))


def test_the_last_token_decides_what_it_should():
    logits = hostile_logits(1, 96)
    for kind in ("unknown last token", "banned"):
        rules = [random_rules(kind, 96, 1)]
        found = {last: bits_of(rules_of(logits, rules, [0], [last])) for last in (LAST, 50)}
        assert not torch.equal(found[LAST], found[50])
    # Rules that do not ask for it do not see it.
    rules = [random_rules("frequency", 96, 1)]
    assert_bits_equal(
        bits_of(rules_of(logits, rules, [0], [LAST])), bits_of(rules_of(logits, rules, [0], [50]))
    )


def test_a_rows_result_does_not_depend_on_the_other_rows():
    num = len(RULE_KINDS)
    logits = hostile_logits(num, 300)
    rules = [random_rules(kind, 300, seed) for seed, kind in enumerate(RULE_KINDS)]
    together = bits_of(rules_of(logits, rules, range(num), [LAST] * num))
    for i, rule in enumerate(rules):
        alone = bits_of(rules_of(logits, [rule], [i], [LAST] * num))
        assert_bits_equal(alone, together[i : i + 1])
    backwards = bits_of(rules_of(logits, rules[::-1], range(num)[::-1], [LAST] * num))
    assert_bits_equal(backwards.flip(0), together)
