"""Steady state of one replica: what a step takes while requests come and go. numpy only.

Closed form. Each of the B sequences of a group takes a token a step and ends after O steps, so a step brings B / O new
prompts to a group. Their number is taken as Poisson over the groups, which all run the mixed form of a step when one of
them has a prompt and wait for the group with most tokens. Mean time per output token is the mean step; the first token
comes after half a step and as many mixed steps as the prompt has chunks. No queue before admission is counted: a fleet
is given replicas for a load of ``MAX_LOAD`` at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moe_runtime.planner.cost_model import CostModel, StepLoad
from moe_runtime.planner.roofline import FloatArray
from moe_runtime.planner.workload import Workload

__all__ = ["MAX_LOAD", "ServingPoints", "serving_points"]

MAX_LOAD = 0.9
"""Share of its greatest request rate that a replica is planned for."""
MOST_PROMPTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPoints:
    """One element per batch size of a group.

    Attributes:
        batch: Sequences of a group that decode.
        decode_s: A step without prompts.
        ttft_s, tpot_s: Means.
        requests_per_s: Of a replica, at most.
        output_tokens_per_s: Of a replica.
    """

    batch: FloatArray
    decode_s: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    requests_per_s: FloatArray
    output_tokens_per_s: FloatArray


def serving_points(
    model: CostModel,
    workload: Workload,
    batch: FloatArray,
    max_num_batched_tokens: int,
    balancedness: float = 1.0,
) -> ServingPoints:
    """What a replica does at each batch size of its groups."""
    groups = model.topology.num_groups
    inputs, outputs = workload.input_tokens, workload.output_tokens
    context = inputs + outputs / 2
    keys = [batch * (context if window is None else min(context, window)) for window, _ in model.windows]
    zero, longest = np.zeros_like(batch), np.full_like(batch, inputs + outputs)
    decode = StepLoad(
        decode_rows=batch, decode_keys=keys, prefill_rows=zero, prefill_pairs=[zero] * len(keys),
        total_rows=batch * groups, wanted_rows=batch, longest_keys=longest,
    )  # fmt: skip
    decode_s = 1e-6 * model.step_us(decode, balancedness).us

    arrivals = batch * groups / outputs
    has_prompt = 1 - np.exp(-arrivals)
    room = np.maximum(max_num_batched_tokens - batch, 1)
    prompts = np.minimum(_most_prompts(batch / outputs, groups), np.maximum(room / inputs, 1))
    busiest = np.minimum(prompts * inputs, room)
    all_prompts = np.maximum(arrivals / has_prompt * inputs, busiest)
    pairs = [busiest * _mean_keys(inputs, window) for window, _ in model.windows]
    mixed = StepLoad(
        decode_rows=batch, decode_keys=keys, prefill_rows=busiest, prefill_pairs=pairs,
        total_rows=batch * groups + np.minimum(all_prompts, groups * busiest), wanted_rows=batch + prompts,
        longest_keys=longest,
    )  # fmt: skip
    mixed_s = 1e-6 * model.step_us(mixed, balancedness).us
    # Prompts that the budget does not hold at once take further steps.
    chunks = np.maximum(1.0, inputs / room)
    mixed_per_step = np.maximum(
        has_prompt, arrivals * inputs / np.maximum(mixed.total_rows - batch * groups, 1)
    )
    extra_s = np.maximum(mixed_s - decode_s, 0)
    is_saturated = mixed_per_step >= 1
    step_s = np.where(is_saturated, mixed_s * mixed_per_step, decode_s + mixed_per_step * extra_s)
    return ServingPoints(
        batch=batch,
        decode_s=decode_s,
        ttft_s=step_s / 2 + chunks * mixed_s,
        tpot_s=step_s,
        requests_per_s=batch * groups / (outputs * step_s),
        output_tokens_per_s=batch * groups / step_s,
    )


def _most_prompts(mean: FloatArray, groups: int) -> FloatArray:
    """About the expected most new prompts of a group, of ``groups`` with a Poisson number each; at least one."""
    most = np.ones_like(mean)
    probability = np.exp(-mean)
    tail = 1 - probability
    for count in range(1, MOST_PROMPTS):
        most = np.where(tail * groups > 0.5, count, most)
        probability = probability * mean / count
        tail = np.maximum(tail - probability, 0)
    return np.maximum(most, 1)


def _mean_keys(num_tokens: int, window: int | None) -> float:
    """Keys that a token of a prompt sees on average."""
    if window is None or window >= num_tokens:
        return (num_tokens + 1) / 2
    return window - window * (window - 1) / (2 * num_tokens)
