"""Checksums on a device are those of the bytes, row by row."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.checksum import checksum
from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.checksum_triton import checksums  # isort: skip


def random_rows(num_rows: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows + sum(shape))
    return torch.randn(num_rows, *shape, generator=generator).bfloat16().to(DEVICE)


def by_bytes(tensors: list[torch.Tensor]) -> list[int]:
    rows = zip(*(tensor.cpu() for tensor in tensors), strict=True)
    return [checksum(torch.cat([part.reshape(-1).view(torch.uint8) for part in row])) for row in rows]


@pytest.mark.parametrize(
    "shapes", [[(4,)], [(6, 8), (8, 6)], [(3, 4), (4, 1500), (12,)], [(40, 1024), (512, 4)]]
)
@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_they_are_those_of_the_bytes(num_rows, shapes):
    tensors = [random_rows(num_rows, *shape) for shape in shapes]
    found = checksums(tensors)
    assert found.tolist() == by_bytes(tensors)
    if num_rows:
        before = tensors[-1][-1].clone()
        tensors[-1].view(torch.uint8).view(num_rows, -1)[-1, -1] ^= 1
        assert not torch.equal(tensors[-1][-1], before)
        assert checksums(tensors).tolist() == [*found.tolist()[:-1], by_bytes(tensors)[-1]]
        assert checksums(tensors)[-1] != found[-1], "control: a bit shows"


def test_a_part_of_the_rows_starts_where_they_start():
    tensors = [random_rows(5, 6, 8), random_rows(5, 8, 6)]
    assert torch.equal(checksums([tensor[:2] for tensor in tensors]), checksums(tensors)[:2])


@pytest.mark.gpu
def test_compiled_they_are_those_of_the_bytes_at_the_size_of_experts():
    tensors = [random_rows(5, 1536, 2048), random_rows(5, 2048, 768)]
    assert checksums(tensors).tolist() == by_bytes(tensors)
