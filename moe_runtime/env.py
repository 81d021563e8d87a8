"""The one file that reads the environment for settings: every flag is also ``MOE_RUNTIME_<FLAG>``.

``--max-num-seqs 8`` is ``MOE_RUNTIME_MAX_NUM_SEQS=8``. A flag wins over its variable. A value that does not parse, or
a variable with the prefix that no flag has, raises.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["PREFIX", "cache_folder", "from_environment", "variables_of"]

PREFIX = "MOE_RUNTIME_"

_Config = TypeVar("_Config")


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where this program keeps results for a user: ``$XDG_CACHE_HOME/moe-runtime``, by default under ~/.cache."""
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "moe-runtime"


def variables_of(config_type: type[Any]) -> list[str]:
    """Names of all variables that ``from_environment`` reads for a configuration class."""
    names = []
    for field_name, field_type in _fields(config_type):
        if isinstance(field_type, type) and is_dataclass(field_type):
            names += variables_of(field_type)
        else:
            names.append(PREFIX + field_name.upper())
    return names


def from_environment(
    config_type: type[_Config],
    environ: Mapping[str, str],
    *,
    known: Iterable[str] = (),
    required: object = None,
) -> _Config:
    """An instance of a configuration dataclass, defaults replaced by what the environment sets.

    Args:
        config_type: Dataclass; fields that are dataclasses themselves are read the same way.
        environ: The environment.
        known: Further variables with the prefix that are in order (those of other commands).
        required: Stands in for fields that have no default and that the environment does not set.

    Raises:
        ValueError: a variable does not parse, breaks a rule of the class, or is unknown.
    """
    expected = {*variables_of(config_type), *known}
    unknown = sorted(name for name in environ if name.startswith(PREFIX) and name not in expected)
    if unknown:
        raise ValueError(f"{unknown[0]} is no setting of this program")
    return _build(config_type, environ, required)


def _build(config_type: type[_Config], environ: Mapping[str, str], required: object) -> _Config:
    values: dict[str, Any] = {
        f.name: required
        for f in fields(config_type)  # type: ignore[arg-type]
        if f.default is MISSING and f.default_factory is MISSING
    }
    for field_name, field_type in _fields(config_type):
        name = PREFIX + field_name.upper()
        if isinstance(field_type, type) and is_dataclass(field_type):
            values[field_name] = _build(field_type, environ, required)
        elif name in environ:
            values[field_name] = _parse(name, environ[name], field_type)
    return config_type(**values)


def _fields(config_type: type[Any]) -> list[tuple[str, Any]]:
    hints = get_type_hints(config_type)
    return [(f.name, hints[f.name]) for f in fields(config_type)]


def _parse(name: str, text: str, kind: Any) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        inner = [option for option in get_args(kind) if option is not type(None)]
        if text.lower() == "none":
            return None
        return _parse(name, text, inner[0])
    if origin is Literal:
        if text in get_args(kind):
            return text
        raise ValueError(f"{name} ({text!r}) must be one of {', '.join(map(str, get_args(kind)))}")
    if origin is tuple:
        return tuple(_parse(name, part, get_args(kind)[0]) for part in text.split(",") if part)
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "0", "false", "no"):
            return text.lower() in ("1", "true", "yes")
        raise ValueError(f"{name} ({text!r}) must be true or false")
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{name} ({text!r}) must be of type {kind.__name__}") from None
    return kind(text)
