"""Strict reading of a JSON configuration: each value is typed and ranged, each key is accounted for.

A key of ``config.json`` is *honoured* (the architecture file lists it and reads it), *inert* at inference
(``INERT_KEYS``), allowed at *fixed* values only (``FIXED_VALUES``), or refused by name. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from moe_runtime.errors import CheckpointError

__all__ = ["FIXED_VALUES", "INERT_KEYS", "ConfigFields", "check_keys"]

# Training-only or bookkeeping: no value of these changes what the model computes for a token.
INERT_KEYS: frozenset[str] = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_flash_attn_2_enabled",
        "_name_or_path",
        "attention_dropout",
        "attn_implementation",
        "decoder_start_token_id",
        "experts_implementation",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "return_dict",
        "return_dict_in_generate",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "task_specific_params",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_last_hidden_states",
        "tokenizer_class",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)

# Keys whose other values would change the model or its sampling in a way that is not implemented. The
# second half are generation defaults that old releases wrote into config.json, at their neutral values.
FIXED_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "is_encoder_decoder": (False,),
    "partial_rotary_factor": (None, 1.0),
    "per_layer_config": (None,),
    "pretraining_tp": (None, 1),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "diversity_penalty": (None, 0.0),
    "do_sample": (None, False),
    "early_stopping": (None, False),
    "encoder_no_repeat_ngram_size": (None, 0),
    "exponential_decay_length_penalty": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "length_penalty": (None, 1.0),
    "max_length": (None, 20),
    "min_length": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beam_groups": (None, 1),
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "remove_invalid_values": (None, False),
    "repetition_penalty": (None, 1.0),
    "suppress_tokens": (None,),
    "temperature": (None, 1.0),
    "top_k": (None, 50),
    "top_p": (None, 1.0),
    "typical_p": (None, 1.0),
}


class ConfigFields:
    """Typed access to one JSON object.

    Args:
        raw: The object.
        prefix: Put before each key in messages, such as ``rope_scaling.``.

    Attributes:
        keys_read: Every key asked for, present or not.
    """

    def __init__(self, raw: Mapping[str, Any], *, prefix: str = "") -> None:
        self.raw = raw
        self.prefix = prefix
        self.keys_read: set[str] = set()

    def get(self, key: str) -> Any:
        """The value as parsed from JSON; None where it is null or absent."""
        self.keys_read.add(key)
        return self.raw.get(key)

    def refuse(self, key: str, rule: str) -> CheckpointError:
        """An error that holds the field, its value and the rule it breaks."""
        if key not in self.raw:
            return CheckpointError(f"{self.prefix}{key} is missing: it {rule}")
        return CheckpointError(f"{self.prefix}{key} ({self.raw[key]!r}) {rule}")

    def integer(self, key: str, *, default: int | None = None, minimum: int = 1) -> int:
        """An integer of at least ``minimum``; absent or null is ``default``, or refused without one."""
        value = self.optional_integer(key, minimum=minimum)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(key, f"must be an integer of at least {minimum}")
        return value

    def optional_integer(self, key: str, *, minimum: int = 1) -> int | None:
        """An integer of at least ``minimum``, or None where it is null or absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.refuse(key, f"must be an integer of at least {minimum}")
        return value

    def integers(self, key: str, *, below: int) -> tuple[int, ...]:
        """A list of integers in ``[0, below)``; absent and null mean an empty one."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < below for item in value
        ):
            raise self.refuse(key, f"must be a list of integers from 0 to {below - 1}")
        return tuple(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        """True or false; absent and null mean ``default``."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, "must be true or false")
        return value

    def number(
        self,
        key: str,
        *,
        default: float | None = None,
        above: float | None = None,
        minimum: float | None = None,
    ) -> float:
        """A finite number in range; absent and null mean ``default``, or are refused without one."""
        value = self.optional_number(key, above=above, minimum=minimum)
        if value is None:
            value = default
        if value is None:
            raise self.refuse(key, _number_rule(above, minimum))
        return value

    def optional_number(
        self, key: str, *, above: float | None = None, minimum: float | None = None
    ) -> float | None:
        """A finite number, greater than ``above`` and at least ``minimum``; None where null or absent."""
        value = self.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not math.isfinite(value)
            or (above is not None and value <= above)
            or (minimum is not None and value < minimum)
        ):
            raise self.refuse(key, _number_rule(above, minimum))
        return float(value)

    def one_of(self, *keys: str) -> str:
        """The spelling in use of a field that has several: the first present, null aside.

        Raises:
            CheckpointError: Two spellings are present and contradict each other.
        """
        present = [key for key in keys if self.get(key) is not None]
        for key in present[1:]:
            if self.raw[key] != self.raw[present[0]]:
                rule = f"contradicts {self.prefix}{present[0]} ({self.raw[present[0]]!r}): they must be equal"
                raise self.refuse(key, rule)
        return present[0] if present else keys[0]

    def token_ids(self, key: str, *, vocab_size: int) -> tuple[int, ...] | None:
        """One token id or a list of them, each inside the vocabulary; None where it is null or absent."""
        value = self.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids):
            raise self.refuse(
                key, f"must be a token id, or a list of them, from 0 to vocab_size - 1 ({vocab_size - 1})"
            )
        return tuple(ids)


def check_keys(
    raw: Mapping[str, Any], *, architecture: str, honoured: Set[str], fixed: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse what the architecture does not implement: all offending keys with their values, in one error.

    Args:
        raw: ``config.json``.
        architecture: Named in the message.
        honoured: Keys that the architecture reads.
        fixed: Keys of this architecture that are allowed at these values only, beside ``FIXED_VALUES``.

    Raises:
        CheckpointError: A key is unknown, or has a value other than those it is allowed at.
    """
    if isinstance(quantization := raw.get("quantization_config"), Mapping):
        method = quantization.get("quant_method", "unnamed method")
        raise CheckpointError(
            f"quantization_config.quant_method ({method!r}) is not implemented: {architecture} loads "
            "float32, bfloat16 and float16 weights"
        )
    problems = []
    for key in sorted(raw.keys() - honoured - INERT_KEYS):
        allowed = fixed.get(key, FIXED_VALUES.get(key))
        if allowed is None:
            problems.append(f"{key} ({raw[key]!r}) is not a key that {architecture} implements")
        elif raw[key] not in allowed:
            problems.append(f"{key} ({raw[key]!r}) must be {' or '.join(map(repr, allowed))}")
    if problems:
        raise CheckpointError("; ".join(problems))


def _number_rule(above: float | None, minimum: float | None) -> str:
    if above is not None:
        return f"must be a finite number greater than {above:g}"
    if minimum is not None:
        return f"must be a finite number of at least {minimum:g}"
    return "must be a finite number"
