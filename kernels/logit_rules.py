"""Rules of a request for its logits, before temperature: penalties, bias and masks.

Definition, per element, in fp32, for the logit x of token v of a row that chooses the next token of a sequence; a step
that is off leaves the bits as they are:

1. repetition: v is in the prompt or the output so far: x / r where x > 0, else x * r.
2. frequency: x - f * c where c > 0, the times that v is in the output so far.
3. presence: x - p where c > 0.
4. bias: x + b(v).
5. masks: -inf where tokens are allowed by name, or by a bit each, and v is not among them, and where v is banned.

The order of penalties and their formulas are those of vLLM's ``SamplingParams`` (presence and frequency over generated
tokens as in OpenAI's API reference; repetition over prompt and generated tokens, Keskar et al., "CTRL: a conditional
transformer language model for controllable generation", 2019, section 4.1, with a product for logits that are not
positive). vLLM adds the bias before the penalties, here it comes after them: a bias is worth the same whatever the
sequence holds.

Numerics: each step is one IEEE fp32 operation per element but for frequency, a product and a difference; the settings
are rounded to fp32 once. Nothing is added over elements, so there is no order, and a row's result depends on its
logits, its rules and its last token alone. NaN stays NaN, which sampling takes for -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["NO_IDS", "Ids", "RowRules", "apply_rules", "apply_rules_reference", "leaves_a_token"]

Ids = NDArray[np.int32]

NO_IDS: Ids = np.empty(0, dtype=np.int32)
_NO_BIAS = np.empty(0, dtype=np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowRules:
    """Rules of one row. Ids are in the vocabulary.

    Attributes:
        repetition_penalty: r above 0; 1 is off.
        frequency_penalty: f; 0 is off.
        presence_penalty: p; 0 is off.
        prompt_ids: Distinct ids of the prompt; needed where r is not 1.
        output_ids: The output so far, repeats and all; needed by any penalty. -1 in its last place is the row's last
            token, where that is known on the device alone.
        bias_ids: Distinct ids with a bias.
        bias: ``[len(bias_ids)]`` float32, finite.
        allowed_ids: Distinct ids that may be chosen; None for all.
        allowed_mask: A grammar's, ``[ceil(vocab / 32)]`` int32: v may be chosen where bit ``v % 32`` of word
            ``v // 32`` is set; None for all.
        banned_ids: Ids that may not be chosen.
        banned_after: As many: -1 for always, else the last token after which the ban holds.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    prompt_ids: Ids = field(default_factory=lambda: NO_IDS)
    output_ids: Ids = field(default_factory=lambda: NO_IDS)
    bias_ids: Ids = field(default_factory=lambda: NO_IDS)
    bias: NDArray[np.float32] = field(default_factory=lambda: _NO_BIAS)
    allowed_ids: Ids | None = None
    allowed_mask: Ids | None = None
    banned_ids: Ids = field(default_factory=lambda: NO_IDS)
    banned_after: Ids = field(default_factory=lambda: NO_IDS)


def apply_rules(logits: torch.Tensor, rules: Sequence[RowRules], last_ids: Sequence[int]) -> torch.Tensor:
    """Logits to sample from, by the definition at the top of this file.

    Args:
        logits: ``[num_rows, vocab]`` float32 on the CPU. Not changed.
        rules: One per row.
        last_ids: Each row's last token.

    Returns:
        ``[num_rows, vocab]`` float32. Bitwise independent of the other rows.
    """
    result = logits.clone()
    for values, rule, last_id in zip(result.numpy(), rules, last_ids, strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            _apply(values, rule, last_id)
    return result


def apply_rules_reference(
    logits: torch.Tensor, rules: Sequence[RowRules], last_ids: Sequence[int]
) -> torch.Tensor:
    """The definition, one token after another; slow. Same arguments and result as ``apply_rules``."""
    result = logits.clone()
    for row, (rule, last_id) in enumerate(zip(rules, last_ids, strict=True)):
        r, f, p = (
            torch.tensor(value, dtype=torch.float32)
            for value in (rule.repetition_penalty, rule.frequency_penalty, rule.presence_penalty)
        )
        output = [last_id if i < 0 else i for i in rule.output_ids.tolist()]
        bias = dict(zip(rule.bias_ids.tolist(), torch.from_numpy(rule.bias), strict=True))
        banned = {
            token_id
            for token_id, after in zip(rule.banned_ids.tolist(), rule.banned_after.tolist(), strict=True)
            if after in (-1, last_id)
        }
        for v in range(logits.shape[1]):
            x, count = result[row, v].clone(), output.count(v)
            if v in rule.prompt_ids or count:
                x = x / r if x > 0 else x * r
            if count:
                x = x - f * torch.tensor(float(count))
                x = x - p
            if v in bias:
                x = x + bias[v]
            is_named = rule.allowed_ids is None or v in rule.allowed_ids
            has_bit = rule.allowed_mask is None or bool(int(rule.allowed_mask[v // 32]) >> v % 32 & 1)
            if v in banned or not is_named or not has_bit:
                x = torch.tensor(-torch.inf)
            result[row, v] = x
    return result


def leaves_a_token(rule: RowRules, last_id: int, vocab_size: int) -> bool:
    """Whether the masks of a row let some token be chosen.

    Args:
        rule: Of the row.
        last_id: The row's last token.
        vocab_size: Columns of its logits.
    """
    allowed = np.ones(vocab_size, dtype=np.bool_)
    if rule.allowed_mask is not None:
        allowed = _bits(rule.allowed_mask, vocab_size)
    if rule.allowed_ids is not None:
        named = np.zeros(vocab_size, dtype=np.bool_)
        named[rule.allowed_ids] = True
        allowed &= named
    allowed[_banned(rule, last_id)] = False
    return bool(allowed.any())


def _apply(values: NDArray[np.float32], rule: RowRules, last_id: int) -> None:
    output = np.where(rule.output_ids < 0, np.int32(last_id), rule.output_ids)
    ids, counts = np.unique(output, return_counts=True)
    if rule.repetition_penalty != 1:
        r = np.float32(rule.repetition_penalty)
        seen = np.union1d(ids, rule.prompt_ids)
        x = values[seen]
        values[seen] = np.where(x > 0, x / r, x * r)
    if rule.frequency_penalty != 0:
        values[ids] -= np.float32(rule.frequency_penalty) * counts.astype(np.float32)
    if rule.presence_penalty != 0:
        values[ids] -= np.float32(rule.presence_penalty)
    values[rule.bias_ids] += rule.bias
    if rule.allowed_ids is not None:
        allowed = values[rule.allowed_ids]
        values.fill(-np.inf)
        values[rule.allowed_ids] = allowed
    if rule.allowed_mask is not None:
        values[~_bits(rule.allowed_mask, len(values))] = -np.inf
    values[_banned(rule, last_id)] = -np.inf


def _banned(rule: RowRules, last_id: int) -> Ids:
    banned: Ids = rule.banned_ids[(rule.banned_after < 0) | (rule.banned_after == last_id)]
    return banned


def _bits(words: Ids, count: int) -> NDArray[np.bool_]:
    return np.unpackbits(words.view(np.uint8), count=count, bitorder="little").astype(np.bool_)
