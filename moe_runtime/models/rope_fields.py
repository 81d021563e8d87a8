"""Rotary embedding parameters of ``config.json``, in the published form and in that of transformers 5.

Published: ``rope_theta`` beside ``rope_scaling`` (null, or an object with ``rope_type`` or ``type``).
Transformers 5: everything inside ``rope_parameters``. Both may be present as long as they say the same.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from moe_runtime.errors import CheckpointError
from moe_runtime.models.config_fields import ConfigFields
from moe_runtime.models.model_config import RopeConfig, RopeKind

__all__ = ["ROPE_KEYS", "parse_rope"]

ROPE_KEYS: frozenset[str] = frozenset(
    {"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}
)

_KINDS: tuple[RopeKind, ...] = get_args(RopeKind)


def parse_rope(fields: ConfigFields, *, default_theta: float) -> RopeConfig:
    """Resolve the rotary embedding.

    Args:
        fields: The whole ``config.json``.
        default_theta: The architecture's base where the file gives none.

    Returns:
        A ``RopeConfig``; fields that its kind does not use keep their defaults.

    Raises:
        CheckpointError: An unknown kind or field, a field that the kind needs and lacks, a value out of
            range, or two places that contradict each other.
    """
    blocks = [
        ConfigFields(_block(fields, key), prefix=f"{key}.")
        for key in ("rope_parameters", "rope_scaling")
        if fields.get(key)
    ]
    theta = _agreed("rope_theta", [fields, *blocks], above=1.0) or default_theta
    outer_context = fields.optional_integer("original_max_position_embeddings")
    configs = [_parse_block(block, theta, outer_context) for block in blocks] or [RopeConfig(theta=theta)]
    if configs[0] != configs[-1]:
        raise fields.refuse(
            "rope_scaling",
            f"contradicts rope_parameters ({fields.get('rope_parameters')!r}): they must be equal",
        )
    if outer_context is not None and configs[0].kind not in ("yarn", "llama3"):
        raise fields.refuse(
            "original_max_position_embeddings",
            f"is not used by rope_type {configs[0].kind!r}: it must be absent",
        )
    return configs[0]


def _block(fields: ConfigFields, key: str) -> Mapping[str, Any]:
    value = fields.get(key)
    if not isinstance(value, Mapping):
        raise fields.refuse(key, "must be an object or null")
    return value


def _agreed(key: str, places: list[ConfigFields], *, above: float) -> float | None:
    """The one value that every place which gives ``key`` gives."""
    first: tuple[str, float] | None = None
    for fields in places:
        value = fields.optional_number(key, above=above)
        if value is None:
            continue
        if first is not None and value != first[1]:
            raise fields.refuse(key, f"contradicts {first[0]} ({first[1]!r}): they must be equal")
        first = first or (fields.prefix + key, value)
    return first[1] if first else None


def _parse_block(fields: ConfigFields, theta: float, outer_context: int | None) -> RopeConfig:
    kind_key = fields.one_of("rope_type", "type")
    kind: Any = fields.get(kind_key) or "default"
    if kind not in _KINDS:
        raise fields.refuse(kind_key, f"must be one of {', '.join(_KINDS)}")
    if fields.optional_number("partial_rotary_factor") not in (None, 1.0):
        raise fields.refuse("partial_rotary_factor", "must be 1.0: partial rotation is not implemented")

    config = _PARSERS[kind](fields, theta, outer_context)
    unknown = [key for key, value in fields.raw.items() if key not in fields.keys_read and value is not None]
    if unknown:
        raise fields.refuse(unknown[0], f"is not a field of rope_type {kind!r}")
    return config


def _parse_default(fields: ConfigFields, theta: float, outer_context: int | None) -> RopeConfig:
    return RopeConfig(theta=theta)


def _parse_linear(fields: ConfigFields, theta: float, outer_context: int | None) -> RopeConfig:
    return RopeConfig(theta=theta, kind="linear", factor=fields.number("factor", minimum=1.0))


def _parse_yarn(fields: ConfigFields, theta: float, outer_context: int | None) -> RopeConfig:
    config = RopeConfig(
        theta=theta,
        kind="yarn",
        factor=fields.number("factor", minimum=1.0),
        original_max_position_embeddings=_original_context(fields, outer_context),
        beta_fast=fields.number("beta_fast", default=32.0, above=0.0),
        beta_slow=fields.number("beta_slow", default=1.0, above=0.0),
        attention_factor=fields.optional_number("attention_factor", above=0.0),
        mscale=fields.optional_number("mscale", minimum=0.0),
        mscale_all_dim=fields.optional_number("mscale_all_dim", minimum=0.0),
        truncate=fields.boolean("truncate", default=True),
    )
    if config.beta_fast < config.beta_slow:
        raise CheckpointError(
            f"{fields.prefix}beta_fast ({config.beta_fast:g}) must be at least beta_slow "
            f"({config.beta_slow:g})"
        )
    return config


def _parse_llama3(fields: ConfigFields, theta: float, outer_context: int | None) -> RopeConfig:
    config = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=fields.number("factor", minimum=1.0),
        original_max_position_embeddings=_original_context(fields, outer_context),
        low_freq_factor=fields.number("low_freq_factor", above=0.0),
        high_freq_factor=fields.number("high_freq_factor", above=0.0),
    )
    if config.high_freq_factor <= config.low_freq_factor:
        raise fields.refuse(
            "high_freq_factor", f"must be greater than low_freq_factor ({config.low_freq_factor:g})"
        )
    return config


def _original_context(fields: ConfigFields, outer_context: int | None) -> int:
    key = "original_max_position_embeddings"
    inner = fields.integer(key, default=outer_context)
    if outer_context is not None and inner != outer_context:
        raise fields.refuse(key, f"contradicts the outer {key} ({outer_context}): they must be equal")
    return inner


_PARSERS = {"default": _parse_default, "linear": _parse_linear, "yarn": _parse_yarn, "llama3": _parse_llama3}
