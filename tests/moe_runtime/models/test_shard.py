"""One safetensors file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_runtime.errors import CheckpointError
from moe_runtime.models.shard import read_header, read_tensor


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(5)}, path)
    return path


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7, 5)])
def test_tensors_read_bit_for_bit(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = {"first": torch.randn(3), "x": torch.randn(shape).to(dtype), "last": torch.randn(3)}
    save_file(tensors, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    with (tmp_path / "x.safetensors").open("rb", buffering=0) as file:
        for stored in header.tensors:
            tensor = read_tensor(file, stored)
            assert tensor.dtype == tensors[stored.name].dtype
            assert torch.equal(tensor, tensors[stored.name])
            assert stored.num_bytes == tensor.nbytes


@pytest.mark.parametrize("kept_bytes", [0, 7, 8, 40])
def test_a_file_cut_inside_its_header_is_refused(shard: Path, kept_bytes: int) -> None:
    shard.write_bytes(shard.read_bytes()[:kept_bytes])
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: truncated.*{kept_bytes} bytes"):
        read_header(shard)


def test_a_file_cut_inside_its_data_is_refused_with_the_first_tensor_lost(shard: Path) -> None:
    size = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{size - 1} bytes, its header describes {size}.*: b$"):
        read_header(shard)


def test_bytes_after_the_last_tensor_are_refused(shard: Path) -> None:
    with shard.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError, match="they must be equal"):
        read_header(shard)


def test_a_file_that_shrinks_after_opening_raises_instead_of_giving_zeros(shard: Path) -> None:
    last = max(read_header(shard).tensors, key=lambda stored: stored.end)
    with shard.open("r+b", buffering=0) as file:
        file.truncate(last.end - 2)
        with pytest.raises(CheckpointError, match=r"x\.safetensors: b: the file ended 2 bytes early"):
            read_tensor(file, last)


@pytest.mark.parametrize(
    ("header", "data", "expected"),
    [
        (b"{", b"", "malformed header"),
        (b"\xff\xfe", b"", "malformed header"),
        (b"[]", b"", "must be a JSON object"),
        (b'{"a": {"dtype": "U8"}}', b"", "a: malformed header entry"),
        ({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"x", "a: malformed header entry"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"x", "a: malformed header entry"),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            b"x" * 4,
            r"must span 8 bytes for F32 \[2\]",
        ),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, b"xx", "a: begins at byte"),
        (
            b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},'
            b'"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
            b"x",
            "a appears twice",
        ),
        (
            {
                "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
            },
            b"xxx",
            "b: begins at byte",
        ),
    ],
)
def test_a_malformed_header_is_refused(tmp_path: Path, header: object, data: bytes, expected: str) -> None:
    with pytest.raises(CheckpointError, match=rf"x\.safetensors: .*{expected}"):
        read_header(write(tmp_path / "x.safetensors", header, data))
