"""Fields that other servers know and this one does not: accepted where they change nothing, else refused.

``null`` changes nothing for any of them. What is accepted here is taken out of the body before its schema
sees it, so the schemas and the OpenAPI document list implemented fields only.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from moe_runtime.errors import InvalidRequestError

__all__ = ["INERT_FIELDS", "NEUTRAL_VALUES", "drop_neutral_fields"]

# Fields that say something about the caller, not about the answer, with the type they must have.
INERT_FIELDS: Mapping[str, type] = {
    "metadata": dict,
    "parallel_tool_calls": bool,
    "prompt_cache_key": str,
    "prompt_cache_retention": str,
    "safety_identifier": str,
    "user": str,
}

# Fields that would change the answer, with the values at which they do not.
NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def drop_neutral_fields(body: Mapping[str, Any], implemented: Container[str] = ()) -> dict[str, Any]:
    """A copy of ``body`` without the fields of this module, those left that its endpoint has ``implemented``.

    Raises:
        InvalidRequestError: one of them has a value that would change the answer.
    """
    kept = {}
    for name, value in body.items():
        if name in implemented:
            kept[name] = value
        elif name in INERT_FIELDS:
            _check_inert(name, value)
        elif name in NEUTRAL_VALUES:
            _check_neutral(name, value)
        else:
            kept[name] = value
    return kept


def _check_inert(name: str, value: Any) -> None:
    kind = INERT_FIELDS[name]
    if value is not None and not isinstance(value, kind):
        words = {dict: "an object", bool: "true or false", str: "a string"}
        raise InvalidRequestError(f"{name} must be {words[kind]}", param=name)


def _check_neutral(name: str, value: Any) -> None:
    values = NEUTRAL_VALUES[name]
    if value is None or any(_same(value, neutral) for neutral in values):
        return
    rule = " or ".join(["null", *(repr(neutral) for neutral in values)])
    raise InvalidRequestError(
        f"{name} is not implemented yet; leave it out or send {rule}",
        param=name,
        code="unsupported_parameter",
    )


def _same(value: Any, neutral: Any) -> bool:
    # Python holds True == 1; JSON does not.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
