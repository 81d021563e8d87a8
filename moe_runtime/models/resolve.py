"""From what a user calls a model to a folder on disk."""

from __future__ import annotations

import re
from pathlib import Path

from moe_runtime.errors import CheckpointError

__all__ = ["BUILTIN", "resolve_model"]

BUILTIN = "builtin"

_HUB_ID = re.compile(r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?", re.ASCII)
_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def resolve_model(model: str) -> Path:
    """Find or download a model.

    Args:
        model: ``builtin``, an existing folder (also one named ``builtin``, as ``./builtin``), or a Hugging
            Face hub id such as ``Qwen/Qwen3-30B-A3B``.

    Returns:
        The model folder.

    Raises:
        CheckpointError: Neither a directory nor a valid hub id, or a hub id that cannot be downloaded and is
            not in the cache.
    """
    if model == BUILTIN:
        return Path(__file__).resolve().parent.parent / "builtin"
    path = Path(model).expanduser()
    if model and path.is_dir():
        return path
    if model and path.exists():
        raise CheckpointError(f"model ({model!r}) must be a directory, {BUILTIN!r} or a hub id, not a file")
    if not _is_hub_id(model):
        raise CheckpointError(
            f"model ({model!r}) is neither an existing directory nor a valid hub id (owner/name)"
        )

    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_PATTERNS, ignore_patterns=["consolidated*"]))
    except Exception as error:  # the hub client raises its own, the HTTP library's and the system's errors
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"model ({model!r}) is not a directory, and as a hub id it cannot be downloaded: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _is_hub_id(model: str) -> bool:
    parts = model.split("/")
    return (
        len(parts) <= 2
        and len(model) <= 96
        and all(_HUB_ID.fullmatch(part) and "--" not in part and ".." not in part for part in parts)
    )
