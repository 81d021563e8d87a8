"""Rules of every kind, alone and together, for tests of the CPU's and the GPU's form."""

from __future__ import annotations

import numpy as np
import torch

from moe_runtime.kernels.logit_rules import RowRules
from tests.bits import hostile

__all__ = ["RULE_KINDS", "hostile_logits", "random_rules"]

RULE_KINDS = (
    "nothing",
    "repetition",
    "frequency",
    "presence",
    "bias",
    "allowed",
    "banned",
    "mask",
    "unknown last token",
    "everything",
)


def hostile_logits(num_rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """Heavy-tailed values, some rows with NaN, infinities, zeros of both signs and the largest number."""
    logits = hostile("heavy_tailed", (num_rows, vocab), seed=seed)
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 3.4e38, -3.4e38])
    for row in range(1, num_rows, 2):
        logits[row, row % 5 :: 9][: len(odd)] = odd[: len(logits[row, row % 5 :: 9])]
    return logits


def random_rules(kind: str, vocab: int, seed: int) -> RowRules:
    """One row's rules; the same for the same arguments."""
    generator = np.random.default_rng(seed)

    def ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return generator.choice(vocab, size=count, replace=False).astype(np.int32)

    output = np.repeat(ids(7), [1, 2, 1, 5, 1, 3, 1]).astype(np.int32)
    generator.shuffle(output)
    bias = {"bias_ids": ids(6), "bias": generator.uniform(-100, 100, 6).astype(np.float32)}
    repetition = {"repetition_penalty": 1.3, "prompt_ids": ids(9), "output_ids": output}
    banned_ids, last = ids(4), 3
    banned = {"banned_ids": banned_ids, "banned_after": np.array([-1, last, 4, -1], dtype=np.int32)}
    mask = generator.integers(-(2**31), 2**31, -(-vocab // 32)).astype(np.int32)
    fields = {
        "nothing": {},
        "repetition": repetition,
        "frequency": {"frequency_penalty": 0.7, "output_ids": output},
        "presence": {"presence_penalty": -1.1, "output_ids": output},
        "bias": bias,
        "allowed": {"allowed_ids": ids(5)},
        "banned": banned,
        "mask": {"allowed_mask": mask},
        "unknown last token": {
            "frequency_penalty": 0.3,
            "output_ids": np.append(output, -1).astype(np.int32),
        },
        "everything": {
            **repetition,
            **bias,
            **banned,
            "frequency_penalty": -0.4,
            "presence_penalty": 1.9,
            "allowed_ids": np.append(ids(30), banned_ids).astype(np.int32),
            "allowed_mask": mask,
        },
    }[kind]
    if "allowed_ids" in fields:
        fields["allowed_ids"] = np.unique(fields["allowed_ids"])
    return RowRules(**fields)
