"""log_softmax over the vocabulary, and the most likely ids, CPU.

Numerics: fp32, one row at a time: maximum, exp, one row sum over the contiguous row (blocking fixed by the
vocabulary size), log. No rounding below fp32. Ranks are by (logit descending, id ascending), as in sampling.
"""

from __future__ import annotations

import torch

__all__ = ["log_softmax", "log_softmax_reference", "top_logprobs"]


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Raw log-softmax.

    Args:
        logits: ``[rows, vocab]`` float32.

    Returns:
        ``[rows, vocab]`` float32; a row's bits do not depend on the other rows.
    """
    logits = logits.contiguous()
    shifted = logits - logits.max(-1, keepdim=True).values
    return shifted - torch.log(torch.exp(shifted).sum(-1, keepdim=True))


def log_softmax_reference(logits: torch.Tensor) -> torch.Tensor:
    """The same in fp64."""
    return torch.log_softmax(logits.double(), dim=-1)


def top_logprobs(
    logits: torch.Tensor, logprobs: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``num_top`` most likely ids of each row, lowest id first among equal logits.

    Ranks by logits: two of them may round to one logprob, and the greedy token must come first.

    Args:
        logits: ``[rows, vocab]`` float32.
        logprobs: ``log_softmax(logits)``.
        num_top: At most ``vocab``.

    Returns:
        ids ``[rows, num_top]`` int64 and logprobs ``[rows, num_top]`` float32.
    """
    ranked = torch.where(logits.isnan(), -torch.inf, logits)  # as sampling ranks them
    ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :num_top]
    return ids, logprobs.gather(-1, ids)
