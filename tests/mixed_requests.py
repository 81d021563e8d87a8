"""Requests of every kind in one batch, and all that is promised of their results: greedy and seeded by turns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moe_runtime.engine.llm import RequestOutput
from moe_runtime.engine.request import SamplingParams

__all__ = ["bits", "mixed_params", "random_prompts"]


def random_prompts(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    """Token ids below 128."""
    generator = random.Random(seed)
    return [[generator.randrange(128) for _ in range(length)] for length in lengths]


def mixed_params(num_requests: int, num_output: int) -> list[SamplingParams]:
    """Greedy and seeded by turns, all with logprobs and experts of prompt and output."""
    greedy = SamplingParams(
        temperature=0,
        max_tokens=num_output,
        logprobs=3,
        prompt_logprobs=2,
        seed=0,
        return_routed_experts=True,
    )
    return [
        greedy if i % 2 else replace(greedy, temperature=1.0, top_p=0.95, top_k=50, seed=1000 + i)
        for i in range(num_requests)
    ]


def bits(output: RequestOutput) -> tuple[Any, ...]:
    """All that is promised, exactly: Python floats hold the fp32 values."""
    choices = [(c.token_ids, c.logprobs, c.routing, c.finish_reason, c.seed) for c in output.outputs]
    return output.prompt_ids, output.prompt_logprobs, choices
