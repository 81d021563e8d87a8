"""Reading weights: from a folder in Hugging Face layout, strictly, or made up from a seed.

Strict means: from the headers alone, before any tensor is read, everything that does not match the model is
found and reported in one error; then each tensor is read once, by itself, so that a rank reads only its own
experts' bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from io import FileIO
from pathlib import Path

import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.models.dummy_checkpoint import DummyCheckpoint
from moe_runtime.models.model_config import TensorSpec
from moe_runtime.models.resolve import resolve_model
from moe_runtime.models.shard import StoredTensor, read_bytes, read_tensor
from moe_runtime.models.shard_index import HEAD_NAME, open_shards
from moe_runtime.models.tensor_source import ReadStats, TensorSource

__all__ = ["Checkpoint", "DummyCheckpoint", "ReadStats", "TensorSource", "resolve_model"]

_COMPARE_CHUNK_BYTES = 4 << 20
_HASH_WHOLE_BYTES = 64 << 20
_SAMPLES_PER_FILE = 64
_SAMPLE_BYTES = 4096


class Checkpoint(TensorSource):
    """A checkpoint on disk, validated as a whole when it is opened.

    Inert ``rotary_emb.inv_freq`` buffers are accepted and never read. A model with a tied head may still
    store ``lm_head.weight``, as many exporters do, but only as a byte-for-byte copy of the embedding: a
    different head would say that the model is not tied after all, and either reading of it could be wrong.
    That one comparison, of bytes that every rank reads anyway, is the only data read on opening.

    Args:
        model_dir: The model folder.
        specs: Every tensor of the model, not only those that this rank wants.

    Raises:
        CheckpointError: Anything does not match; see ``open_shards``.
    """

    def __init__(self, model_dir: Path, specs: Sequence[TensorSpec]) -> None:
        super().__init__(specs)
        self._model_dir = model_dir
        self._index = open_shards(model_dir, specs)
        self._files: dict[Path, FileIO] = {}
        if self._index.tied_head is not None:
            try:
                self._check_tied_head(self._index.tied_head)
            except BaseException:
                self._release()
                raise

    def fingerprint(self) -> str:
        """SHA-256 that names the checkpoint, independent of where it lies.

        Covers the bytes of ``config.json`` and ``generation_config.json``, and of each shard its name, size,
        header and contents: all bytes of a checkpoint of at most 64 MiB, else 64 samples of 4 KiB spread
        evenly over each file from its first to its last byte. So of a large one it tells models, conversions
        and retrained weights apart, not a few changed bytes; the same weights split into other shards have
        another fingerprint.
        """
        digest = hashlib.sha256()
        for name in ("config.json", "generation_config.json"):
            path = self._model_dir / name
            _update(digest, name.encode(), path.read_bytes() if path.is_file() else b"")
        total_bytes = sum(header.file_bytes for header in self._index.headers)
        for header in self._index.headers:
            _update(digest, header.path.name.encode(), str(header.file_bytes).encode(), header.raw)
            with header.path.open("rb") as file:
                if total_bytes <= _HASH_WHOLE_BYTES:
                    _update(digest, file.read())
                    continue
                last_offset = max(header.file_bytes - _SAMPLE_BYTES, 0)
                for i in range(_SAMPLES_PER_FILE):
                    file.seek(last_offset * i // (_SAMPLES_PER_FILE - 1))
                    _update(digest, file.read(_SAMPLE_BYTES))
        return digest.hexdigest()

    def _read(self, spec: TensorSpec) -> torch.Tensor:
        stored = self._index.tensors[spec.name]
        return read_tensor(self._file(stored.path), stored)

    def _stored_bytes(self, spec: TensorSpec) -> int:
        return self._index.tensors[spec.name].num_bytes

    def _read_order(self, spec: TensorSpec) -> tuple[str, int]:
        stored = self._index.tensors[spec.name]
        return stored.path.name, stored.begin

    def _release(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, path: Path) -> FileIO:
        if path not in self._files:
            self._files[path] = path.open("rb", buffering=0)
        return self._files[path]

    def _check_tied_head(self, head: StoredTensor) -> None:
        embed = next(self._index.tensors[name] for name, spec in self._specs.items() if spec.role == "embed")
        if (head.dtype, head.shape) == (embed.dtype, embed.shape) and self._bytes_equal(head, embed):
            return
        raise CheckpointError(
            f"{self._model_dir}: {HEAD_NAME} in {head.path.name} differs from {embed.name} in "
            f"{embed.path.name}: where tie_word_embeddings is true it must be absent or equal"
        )

    def _bytes_equal(self, a: StoredTensor, b: StoredTensor) -> bool:
        for offset in range(0, a.num_bytes, _COMPARE_CHUNK_BYTES):
            chunk_bytes = min(_COMPARE_CHUNK_BYTES, a.num_bytes - offset)
            chunks = bytearray(chunk_bytes), bytearray(chunk_bytes)
            for stored, chunk in zip((a, b), chunks, strict=True):
                read_bytes(self._file(stored.path), stored, stored.begin + offset, memoryview(chunk))
            if chunks[0] != chunks[1]:
                return False
        return True


def _update(digest: hashlib._Hash, *parts: bytes) -> None:
    """Length-prefixed, so that no two sequences of parts meet."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
