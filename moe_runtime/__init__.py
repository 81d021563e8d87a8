"""Batch-invariant, expert-parallel inference for mixture-of-experts language models.

Importing this package imports neither torch nor any server dependency; ``LLM`` is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_runtime.engine.llm import LLM
    from moe_runtime.engine.request import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from moe_runtime.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from moe_runtime.engine.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'moe_runtime' has no attribute {name!r}")
