"""Sampling of one token per row on the CPU: temperature, top-k, top-p, min-p, then a Gumbel-max choice.

A row's token is a function of its logits, its ``RowSampling`` and nothing else: no generator is advanced,
nothing is drawn per batch row. The noise of a candidate is a function of (seed, absolute position, token
id), so it is the same in any batch, schedule or process, with or without the other candidates.

Definition, for a row of fp32 logits (``sample_reference`` is its literal form):

1. NaN counts as -inf. No logit above -inf: token 0. Temperature 0: the highest logit, lowest id on ties.
2. x = (logit - highest logit) / temperature, in fp64; at most 0, so no temperature overflows. A highest
   logit of +inf leaves only its ties.
3. Ranks are by (logit descending, id ascending).
4. top-k keeps the first k ranks; 0, -1 and k of at least the vocabulary are off.
5. Masses are int64: floor(exp(x) * 2**40). top-p keeps a rank if the masses of the kept ranks before it add
   to less than top_p times the total of the kept ranks, compared exactly; 1 is off.
6. min-p keeps masses of at least min_p * 2**40; 0 is off.
7. The token is the argmax over the kept ones of x + noise, in fp64, lowest id on ties. -inf is never chosen.

Numerics: differences, quotients and sums of step 2 and 7 are single IEEE fp64 operations; integer masses
add exactly, so their order cannot matter; ``exp`` and ``log`` see contiguous arrays padded to a multiple of
16 elements, so that no element falls into a vector loop's scalar tail or strided form, which some numpy
builds compute with other bits.

Sources: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11 (Philox); Gumbel,
"Statistical theory of extreme values", 1954, and Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014
(Gumbel-max); Holtzman et al., ICLR 2020 (top-p); Nguyen et al., ICLR 2025 (min-p).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["RowSampling", "gumbel_noise", "philox4x32", "sample", "sample_reference", "sample_row"]

_MASS_SCALE = 2.0**40
_MAX_VOCAB_SIZE = 2**22  # so that masses of a whole row add up below 2**63
_MAX_NOISE = 22.9  # the largest u, 1 - 2**-33, gives 22.8739
_NO_MASS_BELOW = -28.0  # exp(-28) * 2**40 is 0.76: certainly floored to 0

_PHILOX_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
_PHILOX_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_LANES = 16

_Float64s = NDArray[np.float64]
_Int64s = NDArray[np.int64]
_Uint64s = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """How one row's token is chosen.

    Attributes:
        temperature: 0 is greedy.
        top_k: Ranks kept; 0 and -1 are off.
        top_p: Nucleus mass in (0, 1]; 1 is off.
        min_p: Least probability relative to the highest, in [0, 1]; 0 is off.
        seed: Seed of the choice; taken modulo 2**64.
        position: Absolute position, in the sequence, of the token to choose.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature ({self.temperature!r}) must be finite and at least 0")
        if self.top_k < -1:
            raise ValueError(f"top_k ({self.top_k!r}) must be at least -1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p!r}) must be in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p ({self.min_p!r}) must be in [0, 1]")
        if not 0 <= self.position < 2**64:
            raise ValueError(f"position ({self.position!r}) must be in [0, 2**64)")


def philox4x32(
    counter: tuple[_Uint64s, _Uint64s, _Uint64s, _Uint64s], key: tuple[int, int]
) -> tuple[_Uint64s, _Uint64s, _Uint64s, _Uint64s]:
    """Philox4x32-10 of SC'11, vectorised over counters.

    Args:
        counter: Four words below 2**32, lowest first, as uint64 arrays of one shape.
        key: Two words below 2**32, lowest first.

    Returns:
        Four words below 2**32, as uint64 arrays. Integer arithmetic: exact, the same everywhere.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_PHILOX_ROUNDS):
        product0 = c0 * _PHILOX_MULTIPLIERS[0]
        product1 = c2 * _PHILOX_MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ np.uint64(k0),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ np.uint64(k1),
            product0 & _LOW,
        )
        k0 = (k0 + _PHILOX_WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _PHILOX_WEYL[1]) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel_noise(seed: int, position: int, token_ids: _Int64s) -> _Float64s:
    """Standard Gumbel noise of each token id at one position.

    The first Philox word r of counter (token id, position low, position high, 0) and key (seed low, seed
    high) gives u = (r + 0.5) / 2**32, strictly inside (0, 1) and exact, and the noise -log(-log(u)).

    Args:
        seed: Taken modulo 2**64.
        position: Absolute position in the sequence, in [0, 2**64).
        token_ids: ``[num_tokens]`` int64, in [0, 2**32), any order.

    Returns:
        ``[num_tokens]`` float64. Numerics: an element's bits depend on (seed, position, token id) only.
    """
    words = np.ascontiguousarray(token_ids).astype(np.uint64)
    zeros = np.zeros_like(words)
    low, high = (zeros + np.uint64(position >> shift & 0xFFFFFFFF) for shift in (0, 32))
    r = philox4x32((words, low, high, zeros), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))[0]
    return _elementwise(lambda u: -np.log(-np.log(u)), (r.astype(np.float64) + 0.5) / 2.0**32, 0.5)


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[int]:
    """One token per row; each row by itself, see ``sample_row``.

    Args:
        logits: ``[num_rows, vocab]`` float32, any device (copied to the host: a sync). Not changed.
        rows: ``num_rows`` settings.

    Returns:
        ``num_rows`` token ids. Bitwise independent of the other rows and of a row's index.
    """
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(
            f"logits ({list(logits.shape)}) must have one row for each of the {len(rows)} settings"
        )
    return [_sample(values, row) for values, row in zip(_host(logits), rows, strict=True)]


def sample_row(logits: torch.Tensor, row: RowSampling) -> int:
    """The token of one row by the definition at the top of this file.

    Args:
        logits: ``[vocab]`` float32, any device (copied to the host: a sync). Not changed.
        row: Its settings.

    Returns:
        A token id in [0, vocab), whatever the logits hold.
    """
    if logits.dim() != 1:
        raise ValueError(f"logits ({list(logits.shape)}) must have one dimension")
    return _sample(_host(logits), row)


def sample_reference(logits: torch.Tensor, row: RowSampling) -> int:
    """The definition, step by step in Python numbers; slow. Same arguments and result as ``sample_row``."""
    values = [-math.inf if math.isnan(value) else value for value in logits.tolist()]
    highest = max(values)
    if highest == -math.inf:
        return 0
    ranks = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if row.temperature == 0:
        return ranks[0]
    x = {}
    for i in ranks:
        if values[i] == highest:
            x[i] = 0.0
        else:
            x[i] = -math.inf if highest == math.inf else max(values[i] - highest, -math.inf) / row.temperature
    if row.top_k > 0:
        ranks = ranks[: row.top_k]
    mass = {i: int(_masses(np.array([x[i]]))[0]) for i in ranks}
    if row.top_p < 1:
        total = sum(mass.values())
        numerator, denominator = row.top_p.as_integer_ratio()
        before, kept = 0, []
        for i in ranks:
            if before * denominator < numerator * total:
                kept.append(i)
            before += mass[i]
        ranks = kept
    if row.min_p > 0:
        numerator, denominator = row.min_p.as_integer_ratio()
        ranks = [i for i in ranks if mass[i] * denominator >= numerator * int(_MASS_SCALE)]
    best, choice = -math.inf, ranks[0]
    for i in sorted(ranks):
        score = x[i] + float(gumbel_noise(row.seed, row.position, np.array([i]))[0])
        if score > best:
            best, choice = score, i
    return choice


def _host(logits: torch.Tensor) -> NDArray[np.float32]:
    if logits.dtype != torch.float32:
        raise ValueError(f"logits ({logits.dtype}) must be torch.float32")
    if not 0 < logits.shape[-1] <= _MAX_VOCAB_SIZE:
        raise ValueError(f"vocab ({logits.shape[-1]}) must be in [1, {_MAX_VOCAB_SIZE}]")
    values: NDArray[np.float32] = logits.detach().cpu().numpy()
    return values


def _sample(logits: NDArray[np.float32], row: RowSampling) -> int:
    values = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    winner = int(np.argmax(values))
    highest = values[winner]
    if highest == -np.inf:
        return 0
    if row.temperature == 0:
        return winner
    if highest == np.inf:
        x = np.where(values == np.inf, 0.0, -np.inf)
    else:
        with np.errstate(over="ignore"):
            x = (values.astype(np.float64) - np.float64(highest)) / row.temperature
    ids = np.arange(len(values), dtype=np.int64)
    if 0 < row.top_k < len(values):
        ids = _highest(values, row.top_k)
    if row.top_p < 1:
        ids = _nucleus(values, x, ids, row.top_p)
    if row.min_p > 0:
        numerator, denominator = row.min_p.as_integer_ratio()
        ids = ids[_masses(x[ids]) >= -(-numerator * int(_MASS_SCALE) // denominator)]
    # A token whose x cannot reach, even with the most noise, what the winner has already, needs no noise.
    # Rounding is monotone, so the bound holds for the rounded sums as well.
    bound = gumbel_noise(row.seed, row.position, np.array([winner]))[0]
    ids = np.sort(ids[x[ids] + _MAX_NOISE >= bound])
    scores = x[ids] + gumbel_noise(row.seed, row.position, ids)
    return int(ids[np.argmax(scores)])


def _highest(values: NDArray[np.float32], k: int) -> _Int64s:
    """Ids of the first ``k`` ranks, unsorted: above the k-th value, then its ties from the lowest id."""
    kth = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > kth)
    ties = np.flatnonzero(values == kth)[: k - len(above)]
    return np.concatenate([above, ties]).astype(np.int64)


def _nucleus(values: NDArray[np.float32], x: _Float64s, ids: _Int64s, top_p: float) -> _Int64s:
    """Ids of the smallest prefix of ranks that holds ``top_p`` of the mass of ``ids``."""
    # Ids with no mass rank behind the others and are never kept: the mass before them is the total.
    ids = np.sort(ids[x[ids] >= _NO_MASS_BELOW])
    ids = ids[np.argsort(-values[ids], kind="stable")]
    mass = _masses(x[ids])
    cumulative = np.cumsum(mass)
    numerator, denominator = top_p.as_integer_ratio()
    threshold = -(-numerator * int(cumulative[-1]) // denominator)
    return ids[cumulative - mass < threshold]


def _masses(x: _Float64s) -> _Int64s:
    """floor(exp(x) * 2**40) for x of at most 0."""
    return (_elementwise(np.exp, x, 0.0) * _MASS_SCALE).astype(np.int64)


def _elementwise(function: Callable[[_Float64s], _Float64s], values: _Float64s, padding: float) -> _Float64s:
    padded = np.full(-(-len(values) // _LANES) * _LANES, padding)
    padded[: len(values)] = values
    return function(padded)[: len(values)]
