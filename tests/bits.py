"""Bitwise comparison with a reporter, and inputs that make a changed order of additions show.

``assert_bits_equal`` compares bytes: NaN payloads and the sign of zero count. There is no tolerance;
comparisons with a foreign reference use their own table of tolerances.
"""

from __future__ import annotations

import math

import torch

__all__ = ["HOSTILE_KINDS", "assert_bits_equal", "hostile"]

HOSTILE_KINDS = ("normal", "heavy_tailed", "cancelling")


def assert_bits_equal(actual: torch.Tensor, expected: torch.Tensor, label: str = "tensors") -> None:
    """Fail unless both tensors have the same dtype, shape and bytes.

    The message holds the number of mismatches, the first differing coordinate, both values and their bits.
    """
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        raise AssertionError(
            f"{label}: {actual.dtype} {list(actual.shape)} is not {expected.dtype} {list(expected.shape)}"
        )
    actual_bytes, expected_bytes = _element_bytes(actual), _element_bytes(expected)
    differs = (actual_bytes != expected_bytes).any(dim=1)
    num_mismatches = int(differs.sum())
    if num_mismatches == 0:
        return
    first = int(differs.nonzero()[0, 0])
    coordinate = _coordinate(first, actual.shape)
    values = [
        f"{tensor.detach().reshape(-1)[first].item()!r} (0x{_hex(tensor_bytes[first])})"
        for tensor, tensor_bytes in ((actual, actual_bytes), (expected, expected_bytes))
    ]
    raise AssertionError(
        f"{label}: {num_mismatches} of {differs.numel()} elements differ; first at {coordinate}: "
        f"{values[0]}, expected {values[1]}; {actual.dtype} {list(actual.shape)}"
    )


def hostile(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """fp32 test data on the CPU, the same for the same arguments.

    Args:
        kind: ``normal``: N(0, 1). ``heavy_tailed``: N(0, 1) times 2**-40 to 2**40, all finite.
            ``cancelling``: along the last dim, pairs of +L and -L (L = 4096 times a power of two) with
            residues near 1 between them; every other row is shuffled, so that pairs also meet across tiles.
            A sum of a row keeps or loses the residues depending on the order of its additions.
        shape: Of the result.
        seed: Of the generator.

    Returns:
        ``[*shape]`` float32.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "normal":
        return torch.randn(shape, generator=generator)
    if kind == "heavy_tailed":
        exponents = torch.empty(shape).cauchy_(0.0, 4.0, generator=generator).clamp_(-40.0, 40.0)
        return torch.randn(shape, generator=generator) * torch.exp2(exponents.round())
    if kind == "cancelling":
        return _cancelling(shape, generator)
    raise ValueError(f"kind ({kind!r}) must be one of {', '.join(HOSTILE_KINDS)}")


def _cancelling(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    num_columns = shape[-1] if shape else 1
    num_rows = math.prod(shape[:-1])
    rows = torch.empty(num_rows, num_columns)
    for row in rows:
        num_triples = num_columns // 3
        large = 4096.0 * torch.exp2(torch.randint(-2, 9, (num_triples,), generator=generator).float())
        residue = 1.0 + torch.randn(num_columns, generator=generator) / 8
        row.copy_(residue)
        row[0 : 3 * num_triples : 3] = large
        row[2 : 3 * num_triples : 3] = -large
    for row in rows[1::2]:
        row.copy_(row[torch.randperm(num_columns, generator=generator)])
    return rows.reshape(shape)


def _element_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """``[numel, itemsize]`` uint8 on the CPU."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _coordinate(index: int, shape: torch.Size) -> tuple[int, ...]:
    coordinate: list[int] = []
    for extent in reversed(shape):
        index, position = divmod(index, extent)
        coordinate.insert(0, position)
    return tuple(coordinate)


def _hex(element_bytes: torch.Tensor) -> str:
    return bytes(element_bytes.tolist())[::-1].hex()
