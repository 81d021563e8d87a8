"""Sampling defaults of a checkpoint, from its generation_config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from moe_runtime.engine.model_files import read_json
from moe_runtime.engine.request import REPETITION_PENALTY_RANGE
from moe_runtime.errors import CheckpointError

__all__ = ["SamplingDefaults", "sampling_defaults"]

# Keys of generation_config.json that change results, by the value (beside null) that changes nothing.
_UNSUPPORTED_GENERATION_KEYS: tuple[tuple[Any, str], ...] = (
    (1, "encoder_repetition_penalty guidance_scale num_beam_groups num_beams typical_p"),
    (0, "diversity_penalty encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff frequency_penalty"),
    (0, "min_length min_new_tokens no_repeat_ngram_size penalty_alpha presence_penalty"),
    ([], "bad_words_ids begin_suppress_tokens constraints force_words_ids forced_decoder_ids sequence_bias"),
    ([], "suppress_tokens"),
    (False, "remove_invalid_values renormalize_logits"),
    (None, "dola_layers exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id top_h"),
    (None, "watermarking_config"),
)


class SamplingDefaults(TypedDict):
    """Values for the fields of ``SamplingParams`` that a request leaves out."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


def sampling_defaults(model_dir: Path) -> SamplingDefaults:
    """What ``generation_config.json`` says about sampling; absent keys are 1.0 or off, not another
    library's values.

    ``do_sample`` false gives temperature 0, whatever ``temperature`` says. ``top_k`` 0 and -1 are off.

    Raises:
        CheckpointError: naming file, key, value and rule, for malformed values and for keys that would change
            results but are not implemented (beams, ``no_repeat_ngram_size``, ...).
    """
    file = model_dir / "generation_config.json"
    config = read_json(file)
    for neutral, names in _UNSUPPORTED_GENERATION_KEYS:
        for name in names.split():
            value = config.get(name)
            is_same = value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
            if value is not None and not is_same:
                raise CheckpointError(
                    f"{file}: {name} ({value!r}) is not implemented; it must be {neutral!r} or absent"
                )
    do_sample = config.get("do_sample")
    if do_sample not in (None, True, False):
        raise CheckpointError(f"{file}: do_sample ({do_sample!r}) must be true or false")
    temperature = _config_number(file, config, "temperature", 1.0, 0.0, 100.0)
    top_p = _config_number(file, config, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0.0:
        raise CheckpointError(f"{file}: top_p ({top_p:g}) must be above 0")
    top_k = config.get("top_k")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < -1):
        raise CheckpointError(f"{file}: top_k ({top_k!r}) must be an integer of at least -1")
    return SamplingDefaults(
        temperature=0.0 if do_sample is False else temperature,
        top_p=top_p,
        top_k=top_k if top_k is not None and top_k > 0 else 0,
        min_p=_config_number(file, config, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=_config_number(file, config, "repetition_penalty", 1.0, *REPETITION_PENALTY_RANGE),
    )


def _config_number(
    file: Path, config: Mapping[str, Any], name: str, default: float, low: float, high: float
) -> float:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise CheckpointError(f"{file}: {name} ({value!r}) must be a number in [{low:g}, {high:g}]")
    return float(value)
