"""Windows of expert loads to plan for: power laws, bursts, topics. The same numbers for the same seed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["WINDOWS", "make_window"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
WINDOWS = ("power 0.6", "power 0.8", "power 1.0", "power 1.2", "bursty 0.6", "bursty 1.0", "topics")
"""Names for ``make_window``; the number is the exponent of the power law below."""
NUM_TOPICS = 12


def make_window(
    kind: str, num_layers: int, num_experts: int, num_buckets: int = 16, tokens: int = 1 << 16, seed: int = 0
) -> IntArray:
    """``[num_buckets, num_layers, num_experts]`` int64, ``tokens`` in each bucket and layer.

    * ``power``: the experts' shares follow the law in an order of each layer's own and do not change.
    * ``bursty``: besides, in each bucket 8 experts of a layer get a burst of on average four mean shares each, which
      fades by 0.6 from bucket to bucket.
    * ``topics``: every topic has shares of its own (exponent 0.9), and the mix of topics changes from bucket to
      bucket, alike in all layers; so experts of one topic are hot together.
    """
    rng = np.random.default_rng(seed)
    name, _, exponent = kind.partition(" ")
    window = np.empty((num_buckets, num_layers, num_experts), dtype=np.int64)
    mixes = rng.dirichlet(np.full(NUM_TOPICS, 0.4), size=num_buckets)
    for layer in range(num_layers):
        if name == "topics":
            law = _law(num_experts, 0.9)
            shares = mixes @ np.stack([rng.permutation(law) for _ in range(NUM_TOPICS)])
        else:
            shares = np.tile(rng.permutation(_law(num_experts, float(exponent))), (num_buckets, 1))
        if name == "bursty":
            shares = shares + _bursts(rng, num_buckets, num_experts)
        for bucket in range(num_buckets):
            window[bucket, layer] = rng.multinomial(tokens, shares[bucket] / shares[bucket].sum())
    return window


def _law(num_experts: int, exponent: float) -> FloatArray:
    shares = np.arange(1, num_experts + 1) ** -exponent
    return shares / shares.sum()


def _bursts(rng: np.random.Generator, num_buckets: int, num_experts: int) -> FloatArray:
    bursts = np.zeros((num_buckets, num_experts))
    for bucket in range(num_buckets):
        if bucket > 0:
            bursts[bucket] = 0.6 * bursts[bucket - 1]
        chosen = rng.choice(num_experts, 8, replace=False)
        bursts[bucket, chosen] += rng.exponential(4.0 / num_experts, 8)
    return bursts
