"""Which files hold a checkpoint, and whether together they hold exactly the tensors that a model has.

Everything is decided from file names, the index and the shards' headers; no tensor byte is read. All problems
of all files are reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.errors import CheckpointError
from moe_runtime.models.model_config import TensorSpec
from moe_runtime.models.shard import WEIGHT_DTYPES, ShardHeader, StoredTensor, read_header

__all__ = ["HEAD_NAME", "INDEX_NAME", "ShardIndex", "open_shards"]

INDEX_NAME = "model.safetensors.index.json"
HEAD_NAME = "lm_head.weight"

_MAX_LISTED = 10
_FOREIGN_PREFIX = "consolidated"  # a second copy of the weights in Mistral's own layout
_INERT_SUFFIX = "rotary_emb.inv_freq"  # a buffer that old releases saved; computed from the config
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """A checkpoint's validated contents.

    Attributes:
        headers: One per shard, in order of file name.
        tensors: Each tensor of the model, by name.
        tied_head: A stored head of a model whose head is tied to its embedding; None where there is none. Its
            bytes are not compared here.
    """

    headers: tuple[ShardHeader, ...]
    tensors: Mapping[str, StoredTensor]
    tied_head: StoredTensor | None


class _Problems:
    """Collected by kind; a kind lists its first entries and the number of the rest."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[str]] = {}

    def add(self, kind: str, entry: str) -> None:
        self._by_kind.setdefault(kind, []).append(entry)

    def raise_any(self, model_dir: Path) -> None:
        if not self._by_kind:
            return
        lines = [f"{model_dir}: the checkpoint does not match the model"]
        for kind, entries in self._by_kind.items():
            lines.append(f"  {kind} ({len(entries)}):")
            lines.extend(f"    {entry}" for entry in entries[:_MAX_LISTED])
            if len(entries) > _MAX_LISTED:
                lines.append(f"    ... and {len(entries) - _MAX_LISTED} more")
        raise CheckpointError("\n".join(lines))


def open_shards(model_dir: Path, specs: Sequence[TensorSpec]) -> ShardIndex:
    """Find the shards and check index, headers and sizes against the tensors that the model has.

    An index, where there is one, must name every shard and tensor. Without one, exactly one ``.safetensors``
    file may be present, under any name. Files whose name begins with ``consolidated`` are left alone.

    Args:
        model_dir: The model folder.
        specs: Every tensor of the model.

    Raises:
        CheckpointError: Files or tensors are missing, unexpected, duplicated, unindexed, indexed elsewhere,
            truncated, mis-shaped, or of a dtype other than F32, BF16 and F16; each named with its file.
    """
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: not a directory")
    problems = _Problems()
    weight_map, paths = _locate(model_dir, problems)
    headers, broken = [], set()
    for path in paths:
        try:
            headers.append(read_header(path))
        except (CheckpointError, OSError) as error:
            broken.add(path.name)
            problems.add("unreadable files", str(error))

    found = _unique_tensors(headers, problems)
    if weight_map is not None:
        _compare_with_index(weight_map, found, broken, problems)
    tied_head = _compare_with_model(specs, found, weight_map, broken, problems)
    problems.raise_any(model_dir)
    tensors = {spec.name: found[spec.name] for spec in specs}
    return ShardIndex(headers=tuple(headers), tensors=tensors, tied_head=tied_head)


def _locate(model_dir: Path, problems: _Problems) -> tuple[dict[str, str] | None, list[Path]]:
    """The index's map from tensor to file name (None without an index), and the shards."""
    present = sorted(
        entry
        for entry in model_dir.iterdir()
        if entry.name.endswith(".safetensors") and not entry.name.startswith(_FOREIGN_PREFIX)
    )
    index_path = model_dir / INDEX_NAME
    if index_path.exists():
        weight_map = _read_index(index_path)
        named = sorted(set(weight_map.values()))
        for entry in present:
            if entry.name not in named:
                problems.add("files not named by the index", entry.name)
        return weight_map, [model_dir / name for name in named]
    if not present:
        pickles = sorted(e.name for e in model_dir.iterdir() if e.name.endswith(_PICKLE_SUFFIXES))
        hint = f"; {', '.join(pickles[:3])} must be converted to safetensors" if pickles else ""
        raise CheckpointError(f"{model_dir}: holds no .safetensors file{hint}")
    if len(present) > 1:
        names = ", ".join(entry.name for entry in present[:_MAX_LISTED])
        raise CheckpointError(
            f"{model_dir}: {len(present)} .safetensors files ({names}) need an index; {INDEX_NAME} is missing"
        )
    return None, present


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object from tensor names to file names")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise CheckpointError(
                f"{path}: weight_map[{name!r}] ({file_name!r}) must be the name of a file in the same folder"
            )
    return weight_map


def _unique_tensors(headers: Iterable[ShardHeader], problems: _Problems) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for header in headers:
        for stored in header.tensors:
            first = found.setdefault(stored.name, stored)
            if first is not stored:
                problems.add(
                    "tensors in two files", f"{stored.name}: {first.path.name} and {stored.path.name}"
                )
    return found


def _compare_with_index(
    weight_map: Mapping[str, str], found: Mapping[str, StoredTensor], broken: set[str], problems: _Problems
) -> None:
    for name, file_name in weight_map.items():
        stored = found.get(name)
        if stored is None:
            is_broken = file_name in broken
            kind = (
                "tensors of unreadable files" if is_broken else "tensors indexed but absent from their file"
            )
            problems.add(kind, f"{name}: {file_name}")
        elif stored.path.name != file_name:
            problems.add(
                "tensors indexed in another file",
                f"{name}: index says {file_name}, found in {stored.path.name}",
            )
    for name, stored in found.items():
        if name not in weight_map:
            problems.add("tensors not in the index", f"{name}: {stored.path.name}")


def _compare_with_model(
    specs: Sequence[TensorSpec],
    found: Mapping[str, StoredTensor],
    weight_map: Mapping[str, str] | None,
    broken: set[str],
    problems: _Problems,
) -> StoredTensor | None:
    """Compare names, shapes and dtypes; returns the redundant head of a tied model, if stored."""
    expected = {spec.name: spec for spec in specs}
    for name, spec in expected.items():
        stored = found.get(name)
        if stored is None:
            # Tensors of a broken or misindexed file are accounted for by that problem.
            if (weight_map is None and not broken) or (weight_map is not None and name not in weight_map):
                problems.add("missing tensors", f"{name} {list(spec.shape)}: in no file")
        elif stored.shape != spec.shape:
            problems.add(
                "tensors of the wrong shape",
                f"{name}: {list(stored.shape)} in {stored.path.name}, must be {list(spec.shape)}",
            )
        if stored is not None and stored.dtype not in WEIGHT_DTYPES:
            problems.add(
                "tensors of an unsupported dtype",
                f"{name}: {stored.dtype} in {stored.path.name}, must be one of {', '.join(WEIGHT_DTYPES)}",
            )
    is_tied = not any(spec.role == "lm_head" for spec in specs)
    for name, stored in found.items():
        if name in expected or name.endswith(_INERT_SUFFIX) or (is_tied and name == HEAD_NAME):
            continue
        problems.add("unexpected tensors", f"{name}: {stored.path.name}")
    return found.get(HEAD_NAME) if is_tied else None
