"""One safetensors file: its header, checked against the size of the file, and plain reads of single tensors.

Layout: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, byte range), the tensors'
bytes. Tensors are read with ordinary reads, not mapped: a read returns exactly its bytes or raises, whatever
happens to the file meanwhile, and reads can be counted. Imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any

import torch

from moe_runtime.errors import CheckpointError

__all__ = ["WEIGHT_DTYPES", "ShardHeader", "StoredTensor", "read_bytes", "read_header", "read_tensor"]

WEIGHT_DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        path: The shard.
        dtype: As the header spells it, such as ``BF16``.
        begin, end: Byte range in the file.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """A shard's header, parsed and raw.

    Attributes:
        raw: The length field and the JSON, as they stand in the file.
        file_bytes: Size of the file.
    """

    path: Path
    raw: bytes
    file_bytes: int
    tensors: tuple[StoredTensor, ...]


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of one shard; no tensor byte is read.

    Raises:
        CheckpointError: Not a file, truncated, longer than its header says, or a malformed header.
    """
    if path.is_dir():
        raise CheckpointError(f"{path.name}: is a directory, must be a file")
    if not path.exists():
        raise CheckpointError(f"{path.name}: no such file")
    with path.open("rb") as file:
        file_bytes = path.stat().st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise CheckpointError(f"{path.name}: truncated: {file_bytes} bytes, a header needs at least 8")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > min(file_bytes - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path.name}: truncated or not safetensors: header length ({header_bytes}) must fit in the "
                f"file ({file_bytes} bytes) and be at most {_MAX_HEADER_BYTES}"
            )
        text = file.read(header_bytes)
    try:
        header = json.loads(text, object_pairs_hook=_object_without_duplicates)
    except ValueError as error:
        raise CheckpointError(f"{path.name}: malformed header: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path.name}: malformed header: must be a JSON object")
    header.pop("__metadata__", None)
    data_begin = 8 + header_bytes
    tensors = tuple(_stored_tensor(path, name, entry, data_begin) for name, entry in header.items())
    _check_layout(path, tensors, data_begin, file_bytes)
    return ShardHeader(path=path, raw=prefix + text, file_bytes=file_bytes, tensors=tensors)


def read_tensor(file: FileIO, stored: StoredTensor) -> torch.Tensor:
    """Read one tensor.

    Args:
        file: The shard, open for reading.
        stored: Its place; the dtype is one of ``WEIGHT_DTYPES``.

    Returns:
        A new contiguous CPU tensor in the file's dtype.

    Raises:
        CheckpointError: The file has become shorter than its header says.
    """
    tensor = torch.empty(stored.shape, dtype=WEIGHT_DTYPES[stored.dtype])
    if tensor.numel():
        read_bytes(file, stored, stored.begin, tensor.view(-1).view(torch.uint8).numpy().data)
    return tensor


def read_bytes(file: FileIO, stored: StoredTensor, offset: int, view: memoryview) -> None:
    """Fill ``view`` from byte ``offset`` of the file, or raise ``CheckpointError`` naming tensor and file."""
    file.seek(offset)
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])
        if not count:
            raise CheckpointError(
                f"{stored.path.name}: {stored.name}: the file ended {len(view) - done} bytes early; "
                "it was truncated after it was opened"
            )
        done += count


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} appears twice")
    return result


def _stored_tensor(path: Path, name: str, entry: Any, data_begin: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if all(
            isinstance(dim, int) and dim >= 0 for dim in shape
        ):
            pass
        case _:
            raise CheckpointError(f"{path.name}: {name}: malformed header entry ({entry!r})")
    expected_bytes = prod(shape) * _ITEM_BYTES.get(dtype, 0)
    if begin < 0 or end < begin or (dtype in _ITEM_BYTES and end - begin != expected_bytes):
        raise CheckpointError(
            f"{path.name}: {name}: data_offsets ({[begin, end]}) must span {expected_bytes} bytes for "
            f"{dtype} {shape}"
        )
    return StoredTensor(
        name=name, path=path, dtype=dtype, shape=tuple(shape), begin=data_begin + begin, end=data_begin + end
    )


def _check_layout(path: Path, tensors: tuple[StoredTensor, ...], data_begin: int, file_bytes: int) -> None:
    """The format wants the tensors back to back, from the header's end to the file's end."""
    at = data_begin
    for stored in sorted(tensors, key=lambda stored: (stored.begin, stored.end)):
        if stored.begin != at:
            raise CheckpointError(
                f"{path.name}: {stored.name}: begins at byte {stored.begin}, must begin at {at}, where the "
                "tensor before it ends"
            )
        at = stored.end
        if at > file_bytes:
            raise CheckpointError(
                f"{path.name}: truncated: {file_bytes} bytes, its header describes "
                f"{max(t.end for t in tensors)}; first tensor cut off: {stored.name}"
            )
    if at != file_bytes:
        raise CheckpointError(
            f"{path.name}: {file_bytes} bytes, its header describes {at}: they must be equal"
        )
