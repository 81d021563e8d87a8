"""Penalties, bias and masks of rows in Triton, by the definition in ``logit_rules.py``.

Symbols: R rows with rules, V columns (vocabulary), S segments, N numbers in them. A segment is a run of ids of one row
and one kind: its output, its prompt, what it allows, bans or biases. Bits that allow tokens come as M masks of
ceil(V / 32) words.

Three passes: marks count and flag each element's ids by integer atomics, whose order cannot matter; then every
element is computed from its logit and its mark; then biases are added, which a mask's -inf does not feel. An id that
the host does not know yet is the row's last token, which a step before has left on the device.

Numerics: elementwise IEEE fp32 operations alone, the CPU's: results are equal, bit for bit, on all devices, whatever
the tile, and a row's do not depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from moe_runtime.kernels import logit_rules
from moe_runtime.kernels.logit_rules import RowRules
from moe_runtime.kernels.ranks_triton import logits_shape
from moe_runtime.kernels.triton_launch import cdiv, launch_options, tensors_cost

__all__ = ["RuleRows", "apply_rules", "apply_rules_reference"]

_OUTPUT, _PROMPT, _ALLOWED, _BANNED, _BIAS = (tl.constexpr(kind) for kind in range(5))
_COUNT_MASK = tl.constexpr(2**24 - 1)
_PROMPT_FLAG, _ALLOWED_FLAG, _BANNED_FLAG = (tl.constexpr(1 << bit) for bit in (24, 25, 26))

# int32 per row: which row of the logits, r, f, p, whether ids are allowed by name, which mask it has (-1: none)
_SETTINGS = 6
_SEGMENT = 4  # int32 per segment: row, kind, start, length
_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRows:
    """Rules of R rows on the device.

    Attributes:
        settings: ``[6, R]`` int32; columns as ``_SETTINGS`` says, floats by their bits.
        segments: ``[S, 4]`` int32: row in [0, R), kind, start in ``ids``, length. What belongs to ids, the token that a
            ban follows or the bits of a bias, follows them in a run of the same length.
        ids: ``[N]`` int32.
        masks: ``[M, ceil(V / 32)]`` int32, bits of tokens that may be chosen; a row's mask is one of them.
        longest: Largest length of a segment.
        has_bias: Whether some segment is a bias.
    """

    settings: torch.Tensor
    segments: torch.Tensor
    ids: torch.Tensor
    masks: torch.Tensor
    longest: int
    has_bias: bool

    @property
    def row_idx(self) -> torch.Tensor:
        """``[R]`` int32: row of the logits to which each belongs."""
        return self.settings[0]

    @classmethod
    def of(cls, rules: Sequence[RowRules], row_idx: Sequence[int], device: torch.device | str) -> RuleRows:
        """Rules by one copy, from pinned memory to a GPU (no host sync).

        Args:
            rules: R rules.
            row_idx: Row of the logits to which each belongs.
            device: Where to.
        """
        segments: list[tuple[int, int, int, int]] = []
        runs: list[NDArray[np.int32]] = []
        num_ids = 0
        for row, rule in enumerate(rules):
            for kind, ids, more in _runs(rule):
                if len(ids):
                    segments.append((row, kind, num_ids, len(ids)))
                    runs += [ids] if more is None else [ids, more]
                    num_ids += len(ids) if more is None else 2 * len(ids)
        num_settings, num_segments = _SETTINGS * len(rules), _SEGMENT * len(segments)
        masks = [rule.allowed_mask for rule in rules if rule.allowed_mask is not None]
        num_words = sum(len(mask) for mask in masks)
        host = torch.empty(
            num_settings + num_segments + num_words + num_ids,
            dtype=torch.int32,
            pin_memory=torch.device(device).type == "cuda",
        )
        masks_at, ids_at = num_settings + num_segments, num_settings + num_segments + num_words
        settings, parts, words, ids = np.split(host.numpy(), [num_settings, masks_at, ids_at])
        settings = settings.reshape(_SETTINGS, len(rules))
        settings[0] = row_idx
        for column, values in enumerate(
            (
                [rule.repetition_penalty for rule in rules],
                [rule.frequency_penalty for rule in rules],
                [rule.presence_penalty for rule in rules],
            ),
            start=1,
        ):
            settings[column] = np.array(values, dtype=np.float32).view(np.int32)
        settings[4] = [rule.allowed_ids is not None for rule in rules]
        has_mask = np.array([rule.allowed_mask is not None for rule in rules])
        settings[5] = np.where(has_mask, np.cumsum(has_mask) - 1, -1)
        if masks:
            np.concatenate(masks, out=words)
        parts[:] = np.array(segments, dtype=np.int32).reshape(-1)
        if runs:
            np.concatenate(runs, out=ids)
        moved = host.to(device, non_blocking=True)
        return cls(
            settings=moved[:num_settings].view(_SETTINGS, len(rules)),
            segments=moved[num_settings:masks_at].view(-1, _SEGMENT),
            ids=moved[ids_at:],
            masks=moved[masks_at:ids_at].view(len(masks), num_words // max(len(masks), 1)),
            longest=max((length for *_, length in segments), default=0),
            has_bias=any(kind == _BIAS.value for _, kind, *_ in segments),
        )


def apply_rules(logits: torch.Tensor, rows: RuleRows, last_ids: torch.Tensor) -> torch.Tensor:
    """Logits to sample from, of the rows that have rules.

    Args:
        logits: ``[B, V]`` float32; columns contiguous, any row stride. Not changed.
        rows: Rules of R of these rows.
        last_ids: ``[B]`` int32, each row's last token.

    Returns:
        ``[R, V]`` float32. No host sync.
    """
    vocab = logits_shape(logits)[1]
    num_rows = rows.settings.shape[1]
    out = torch.empty(num_rows, vocab, dtype=torch.float32, device=logits.device)
    marks = torch.zeros(num_rows, vocab, dtype=torch.int32, device=logits.device)
    options = launch_options(num_warps=4, num_stages=1, pdl=False)
    by_segment = (rows.segments.shape[0], cdiv(rows.longest, _BLOCK))
    if rows.longest:
        _mark_kernel[by_segment](
            rows.segments, rows.ids, rows.settings, last_ids, marks, vocab, _BLOCK, **options
        )
    _apply_kernel[num_rows, cdiv(vocab, _BLOCK)](
        logits, logits.stride(0), vocab, rows.settings, num_rows, rows.masks, marks, out, _BLOCK, **options
    )
    if rows.has_bias:
        _bias_kernel[by_segment](rows.segments, rows.ids, out, vocab, _BLOCK, **options)
    return out


def apply_rules_reference(
    logits: torch.Tensor, rules: Sequence[RowRules], row_idx: Sequence[int], last_ids: Sequence[int]
) -> torch.Tensor:
    """The same by the CPU's function, from rules that have not been packed."""
    index = list(row_idx)
    picked = logits[index].cpu()
    return logit_rules.apply_rules(picked, rules, [last_ids[i] for i in index]).to(logits.device)


@triton.jit(launch_metadata=tensors_cost("ids", besides="marks"))
def _mark_kernel(  # type: ignore[no-untyped-def]
    segments, ids, settings, last_ids, marks, vocab, BLOCK: tl.constexpr
):
    row, kind, start, length = _segment(segments)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (places < length) & (kind != _BIAS)
    token_ids = tl.load(ids + start + places, mask=inside, other=0)
    last_id = tl.load(last_ids + tl.load(settings + row))
    token_ids = tl.where(token_ids < 0, last_id, token_ids)
    after = tl.load(ids + start + length + places, mask=inside & (kind == _BANNED), other=-1)
    inside = inside & ((after < 0) | (after == last_id))
    targets = marks + row.to(tl.int64) * vocab + token_ids
    one = tl.where(places >= 0, 1, 0)
    tl.atomic_add(targets, one, mask=inside & (kind == _OUTPUT), sem="relaxed")
    flag = tl.where(kind == _PROMPT, _PROMPT_FLAG, tl.where(kind == _ALLOWED, _ALLOWED_FLAG, _BANNED_FLAG))
    tl.atomic_or(targets, one * flag, mask=inside & (kind != _OUTPUT), sem="relaxed")


@triton.jit(do_not_specialize=["num_rows"], launch_metadata=tensors_cost("out", 8, besides="logits"))
def _apply_kernel(  # type: ignore[no-untyped-def]
    logits, row_stride, vocab, settings, num_rows, masks, marks, out, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(settings + row).to(tl.int64)
    repetition = tl.load(settings + num_rows + row).to(tl.float32, bitcast=True)
    frequency = tl.load(settings + 2 * num_rows + row).to(tl.float32, bitcast=True)
    presence = tl.load(settings + 3 * num_rows + row).to(tl.float32, bitcast=True)
    names_allowed = tl.load(settings + 4 * num_rows + row) != 0
    mask_idx = tl.load(settings + 5 * num_rows + row).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    x = tl.load(logits + source * row_stride + columns, mask=inside, other=0.0)
    mark = tl.load(marks + row * vocab + columns, mask=inside, other=0)
    count = mark & _COUNT_MASK
    seen = (mark & (_COUNT_MASK | _PROMPT_FLAG)) != 0
    x = tl.where(seen, tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition), x)
    x = tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)
    blocked = ((mark & _BANNED_FLAG) != 0) | (names_allowed & ((mark & _ALLOWED_FLAG) == 0))
    words = tl.load(
        masks + mask_idx * tl.cdiv(vocab, 32) + columns // 32, mask=inside & (mask_idx >= 0), other=-1
    )
    blocked = blocked | (((words >> (columns % 32)) & 1) == 0)
    tl.store(out + row * vocab + columns, tl.where(blocked, float("-inf"), x), mask=inside)


@triton.jit(launch_metadata=tensors_cost("ids", besides="out"))
def _bias_kernel(segments, ids, out, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, kind, start, length = _segment(segments)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (places < length) & (kind == _BIAS)
    token_ids = tl.load(ids + start + places, mask=inside, other=0)
    bias = tl.load(ids + start + length + places, mask=inside, other=0).to(tl.float32, bitcast=True)
    targets = out + row.to(tl.int64) * vocab + token_ids
    tl.store(targets, tl.load(targets, mask=inside, other=0.0) + bias, mask=inside)


@triton.jit
def _segment(segments):  # type: ignore[no-untyped-def]
    """Row, kind, start and length of this program's segment."""
    segment = segments + 4 * tl.program_id(0)
    return tl.load(segment), tl.load(segment + 1), tl.load(segment + 2), tl.load(segment + 3)


def _runs(rule: RowRules) -> list[tuple[int, NDArray[np.int32], NDArray[np.int32] | None]]:
    """Kind, ids and what belongs to the ids."""
    return [
        (_OUTPUT.value, rule.output_ids, None),
        (_PROMPT.value, rule.prompt_ids, None),
        (_ALLOWED.value, logit_rules.NO_IDS if rule.allowed_ids is None else rule.allowed_ids, None),
        (_BANNED.value, rule.banned_ids, rule.banned_after),
        (_BIAS.value, rule.bias_ids, rule.bias.view(np.int32)),
    ]
