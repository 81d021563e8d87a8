"""From a model folder to its configuration and the tensors it must hold. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from moe_runtime.errors import CheckpointError
from moe_runtime.models import mixtral, qwen3_moe
from moe_runtime.models.model_config import ModelConfig, TensorSpec

__all__ = ["ARCHITECTURES", "Architecture", "load_model_config", "tensor_specs"]


class Architecture(Protocol):
    """What an architecture file defines."""

    def parse_config(self, raw: Mapping[str, Any], generation: Mapping[str, Any] | None) -> ModelConfig:
        """Read ``config.json`` and ``generation_config.json``."""

    def tensor_specs(self, config: ModelConfig) -> tuple[TensorSpec, ...]:
        """Every tensor of a checkpoint of this configuration."""


ARCHITECTURES: Mapping[str, Architecture] = {
    mixtral.ARCHITECTURE: mixtral,
    qwen3_moe.ARCHITECTURE: qwen3_moe,
}


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read ``config.json`` and, where it exists, ``generation_config.json``.

    Raises:
        CheckpointError: The folder or file is missing or malformed, the architecture is not supported, or a
            key or value is not implemented. The message begins with the path of the file.
    """
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: not a directory")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a model folder needs one")
    raw = _read_object(path)
    generation_path = model_dir / "generation_config.json"
    generation = _read_object(generation_path) if generation_path.is_file() else None
    try:
        return _architecture(raw.get("architectures")).parse_config(raw, generation)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def tensor_specs(config: ModelConfig) -> tuple[TensorSpec, ...]:
    """Every tensor of a checkpoint of this configuration, under its published name."""
    return _architecture([config.architecture]).tensor_specs(config)


def _architecture(names: object) -> Architecture:
    if (
        isinstance(names, list)
        and len(names) == 1
        and isinstance(names[0], str)
        and names[0] in ARCHITECTURES
    ):
        return ARCHITECTURES[names[0]]
    supported = ", ".join(sorted(ARCHITECTURES))
    raise CheckpointError(f"architectures ({names!r}) must hold exactly one of {supported}")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value
