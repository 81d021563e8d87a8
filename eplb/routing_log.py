"""Files of the experts that each token of many requests went to: what planners learn loads from, away from a server.

Layout, integers little-endian, CRC-32 as in zip:

    magic    8 bytes ``MOERTLOG``
    header   uint32 length, JSON in UTF-8, uint32 CRC-32 of the JSON
    record*  uint32 num_tokens, ids ``[num_tokens, num_layers, num_topk]`` in C order, uint32 CRC-32 of both
    end      uint32 0xFFFFFFFF, uint64 number of records, uint64 number of tokens, uint32 CRC-32 of the three

A record is one request's choice: the tokens of its prompt, then those of its output but the last, which has not run.
Ids are logical experts, uint8 up to 256 experts, else uint16; a layer's are in slot order. The header:

    {"format": "moe-runtime-routing-log", "version": 1, "moe_layer_ids": [1, 2], "num_logical_experts": 64,
     "num_topk": 6, "fingerprint": "fp_..."}

A file that ends early, or has a byte changed, is refused with one message; what was read of it before is not to be
used.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moe_runtime.eplb.loads import IntArray

__all__ = [
    "MAGIC",
    "IdArray",
    "RoutingLogHeader",
    "RoutingLogWriter",
    "iter_routing_log",
    "read_routing_header",
    "routing_log_counts",
]

MAGIC = b"MOERTLOG"
FORMAT, VERSION = "moe-runtime-routing-log", 1
_END = 0xFFFFFFFF
_MAX_HEADER_BYTES = 1 << 20

IdArray = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingLogHeader:
    """What the ids of a log mean.

    Attributes:
        moe_layer_ids: The model's numbers of its layers with experts, ascending.
        num_logical_experts: Of every such layer.
        num_topk: Experts per token.
        fingerprint: Of checkpoint and numerics, as in ``system_fingerprint``.
    """

    moe_layer_ids: tuple[int, ...]
    num_logical_experts: int
    num_topk: int
    fingerprint: str

    def __post_init__(self) -> None:
        layers = self.moe_layer_ids
        if (
            not layers
            or any(type(i) is not int or i < 0 for i in layers)
            or sorted(set(layers)) != list(layers)
        ):
            raise ValueError(
                f"moe_layer_ids ({list(layers)}) must be ascending numbers of layers, at least one"
            )
        for name, most in (("num_logical_experts", 1 << 16), ("num_topk", self.num_logical_experts)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name} ({value!r}) must be an integer in [1, {most}]")
        if not isinstance(self.fingerprint, str):
            raise ValueError(f"fingerprint ({self.fingerprint!r}) must be a string")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the ids."""
        return np.dtype("u1" if self.num_logical_experts <= 256 else "<u2")

    @property
    def shape(self) -> tuple[int, int]:
        """Layers with experts, and slots."""
        return len(self.moe_layer_ids), self.num_topk


class RoutingLogWriter:
    """Writes a log.

    Args:
        file: Takes the bytes; stays open.
        header: Of all records.

    Attributes:
        num_records, num_tokens: Written so far.
    """

    def __init__(self, file: BinaryIO, header: RoutingLogHeader) -> None:
        self.num_records = self.num_tokens = 0
        self._file = file
        self._header = header
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(header)}).encode()
        file.write(MAGIC + struct.pack("<I", len(text)) + text + struct.pack("<I", zlib.crc32(text)))

    def add(self, ids: npt.NDArray[np.integer[Any]]) -> None:
        """Write one record.

        Args:
            ids: ``[num_tokens, num_layers, num_topk]`` logical experts.
        """
        if ids.ndim != 3 or ids.shape[1:] != self._header.shape:
            raise ValueError(f"ids (shape {ids.shape}) must be [num_tokens, {self._header.shape}]")
        _check_range(ids, self._header, "ids")
        data = struct.pack("<I", len(ids)) + np.ascontiguousarray(ids, dtype=self._header.dtype).tobytes()
        self._file.write(data + struct.pack("<I", zlib.crc32(data)))
        self.num_records += 1
        self.num_tokens += len(ids)

    def finish(self) -> None:
        """Write the end, without which the log is refused."""
        end = struct.pack("<IQQ", _END, self.num_records, self.num_tokens)
        self._file.write(end + struct.pack("<I", zlib.crc32(end)))


def read_routing_header(path: Path) -> RoutingLogHeader:
    """The header of a log.

    Raises:
        ValueError: the file cannot be read, or is none.
    """
    with _opened(path) as file:
        return _Reader(path, file).header


def iter_routing_log(path: Path) -> Iterator[IdArray]:
    """The records of a log in order, each ``[num_tokens, num_layers, num_topk]``; one is in memory at a time.

    Raises:
        ValueError: the file cannot be read, is none, has been cut or changed; maybe after some records.
    """
    with _opened(path) as file:
        yield from _Reader(path, file).records()


def routing_log_counts(path: Path, num_buckets: int = 16) -> IntArray:
    """Tokens of each expert, in buckets of as many consecutive tokens of the log, as far as their number divides.

    Returns:
        ``[num_buckets, num_layers, num_logical]`` int64; no more buckets than tokens, at least one.

    Raises:
        ValueError: as for ``iter_routing_log``.
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets ({num_buckets}) must be at least 1")
    header = read_routing_header(path)
    num_tokens = sum(len(ids) for ids in iter_routing_log(path))
    num_buckets = max(1, min(num_buckets, num_tokens))
    num_layers, num_experts = header.shape[0], header.num_logical_experts
    counts = np.zeros((num_buckets, num_layers * num_experts), dtype=np.int64)
    ends = [num_tokens * (bucket + 1) // num_buckets for bucket in range(num_buckets)]
    first = np.arange(num_layers, dtype=np.int64)[:, None] * num_experts
    bucket = done = 0
    for ids in iter_routing_log(path):
        at = 0
        while at < len(ids):
            if done == ends[bucket]:
                bucket += 1
            part = ids[at : at + ends[bucket] - done]
            counts[bucket] += np.bincount((part + first).ravel(), minlength=counts.shape[1])
            at += len(part)
            done += len(part)
    return counts.reshape(num_buckets, num_layers, num_experts)


class _Reader:
    """A log under way; reads the header when made."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        if file.read(len(MAGIC)) != MAGIC:
            raise self._error(f"must start with {MAGIC.decode()}")
        (length,) = struct.unpack("<I", self._read(4))
        if length > _MAX_HEADER_BYTES:
            raise self._error(f"header ({length} bytes) must be at most {_MAX_HEADER_BYTES}")
        text = self._read(length)
        self._check(text, "the header")
        self.header = self._parsed(text)

    def records(self) -> Iterator[IdArray]:
        """To the end, and to the end of the file."""
        dtype, shape = self.header.dtype, self.header.shape
        num_records = num_tokens = 0
        while True:
            start = self._read(4)
            (length,) = struct.unpack("<I", start)
            if length == _END:
                break
            # In pieces: a length that was changed must not ask for memory that the file does not fill.
            data = self._read(length * shape[0] * shape[1] * dtype.itemsize)
            self._check(start + data, f"record {num_records}")
            ids = np.frombuffer(data, dtype=dtype).reshape(length, *shape)
            _check_range(ids, self.header, f"routing log {self._path}: record {num_records}")
            yield ids
            num_records += 1
            num_tokens += length
        counted = self._read(16)
        self._check(start + counted, "the end")
        if struct.unpack("<QQ", counted) != (num_records, num_tokens):
            raise self._error(
                f"must hold as many records and tokens as its end says {struct.unpack('<QQ', counted)}"
            )
        if self._file.read(1):
            raise self._error("must end after its end record")

    def _read(self, num_bytes: int) -> bytes:
        parts, left = [], num_bytes
        while left:
            part = self._file.read(min(left, 1 << 24))
            if not part:
                raise self._error("is cut short")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _check(self, data: bytes, what: str) -> None:
        (told,) = struct.unpack("<I", self._read(4))
        if told != zlib.crc32(data):
            raise self._error(f"the checksum of {what} must be {zlib.crc32(data):08x}; it is {told:08x}")

    def _parsed(self, text: bytes) -> RoutingLogHeader:
        try:
            fields = json.loads(text)
            known = {"format": FORMAT, "version": VERSION}
            for name, value in known.items():
                if fields[name] != value:
                    raise ValueError(f"{name} ({fields[name]!r}) must be {value!r}")
            rest = {name: value for name, value in fields.items() if name not in known}
            return RoutingLogHeader(**{**rest, "moe_layer_ids": tuple(rest["moe_layer_ids"])})
        except (ValueError, TypeError, KeyError) as error:
            raise self._error(f"the header cannot be used: {error}") from None

    def _error(self, what: str) -> ValueError:
        return ValueError(f"routing log {self._path}: {what}")


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ValueError(f"routing log {path} cannot be read: {error.strerror}") from None


def _check_range(ids: npt.NDArray[np.integer[Any]], header: RoutingLogHeader, what: str) -> None:
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < header.num_logical_experts:
        raise ValueError(
            f"{what} ({int(ids.min())} to {int(ids.max())}) must be logical experts below "
            f"num_logical_experts ({header.num_logical_experts})"
        )
