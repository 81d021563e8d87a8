"""Small text files of a model folder. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_runtime.errors import CheckpointError

__all__ = ["read_json", "read_text"]


def read_text(file: Path) -> str | None:
    """Contents, or None where there is no such file. Raises ``CheckpointError`` for one that cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The file's object, empty where there is no such file. Raises ``CheckpointError`` for anything else."""
    text = read_text(file)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{file} is malformed: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is malformed: must hold a JSON object, not {type(value).__name__}")
    return value
