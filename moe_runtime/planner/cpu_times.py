"""Times of a CPU rank's parts, each alone: attention and experts of one layer, and the step around the layers.

Run by ``moe-runtime calibrate``. "Around" is the engine's own step with the layers taken out: scheduling, the batch,
embedding, head, sampling, results.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from moe_runtime.planner.shapes import ModelShape

if TYPE_CHECKING:
    from moe_runtime.engine.llm import LLM

__all__ = ["cpu_kernel_times"]

ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
CONTEXTS = (64, 512)
AROUND_ROWS = (1, 2, 4, 8, 16, 32, 64)
LAUNCHES = 24
WARM_UPS = 3
NUM_INPUTS = 8
BLOCK_TOKENS = 64

_Row = dict[str, Any]


def cpu_kernel_times(llm: LLM, shape: ModelShape) -> list[_Row]:
    """Rows of a device file's ``kernels``: component, rows, keys or pairs, microseconds, bytes and products.

    Args:
        llm: One rank with the whole model; its layers are used, its requests must have ended.
        shape: Of the model.
    """
    import torch

    with torch.inference_mode():
        return [*_attention(llm, shape), *_experts(llm, shape), *_around(llm, shape)]


def _attention(llm: LLM, shape: ModelShape) -> Iterator[_Row]:
    """Norm, attention and residual of a layer: rows of one token each behind a context, then whole prompts."""
    import torch

    from moe_runtime.kernels.attention import make_attention_plan
    from moe_runtime.kernels.rms_norm import add_residual, rms_norm

    decoder: Any = llm.model.decoder  # the CPU's
    config = llm.model.plan.config
    num_groups = config.num_query_heads_per_kv_head
    longest = min(max(CONTEXTS), llm.model.plan.max_model_len)
    num_blocks = max(ROWS) * -(-longest // BLOCK_TOKENS)
    cache = [
        torch.zeros(num_blocks, config.num_kv_heads, BLOCK_TOKENS, config.head_dim, dtype=decoder.dtype)
        for _ in range(2)
    ]

    def measure(lengths: list[int], contexts: list[int]) -> float:
        tables, first = [], 0
        for context in contexts:
            blocks = -(-context // BLOCK_TOKENS)
            tables.append(list(range(first, first + blocks)))
            first += blocks
        starts = [context - length for context, length in zip(contexts, lengths, strict=True)]
        spans = zip(lengths, starts, strict=True)
        positions = torch.cat([torch.arange(start, start + length) for length, start in spans])
        owner = [table for table, length in zip(tables, lengths, strict=True) for _ in range(length)]
        slots = torch.tensor(
            [
                table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
                for table, position in zip(owner, positions.tolist(), strict=True)
            ]
        )
        x = torch.randn(len(positions), config.hidden_size).to(decoder.dtype)
        plan = make_attention_plan(lengths, starts, tables, num_groups)

        def run() -> None:
            for layer in decoder.layers:  # in turn, so that weights are as cold as in a step
                normed = rms_norm(x, layer.input_norm, config.rms_norm_eps)
                add_residual(x, layer.attention(normed, positions, slots, plan, decoder.rotary, *cache))

        return _us(run) / len(decoder.layers)

    elements = shape.attention.shared_elements(shape.hidden) + shape.attention.kv_elements(shape.hidden)
    for context in CONTEXTS:
        for rows in ROWS[:-1]:
            if context <= longest:
                us = measure([1] * rows, [context] * rows)
                yield _row("attention_half", rows, us, elements, keys=rows * context)
    for length in ROWS[4:]:
        if length <= longest:
            us = measure([length], [length])
            yield _row("attention_half", length, us, elements, pairs=length * (length + 1) // 2)


def _experts(llm: LLM, shape: ModelShape) -> Iterator[_Row]:
    """Norm, router, experts, sum and residual of a layer."""
    import torch

    from moe_runtime.kernels.rms_norm import add_residual, rms_norm

    decoder: Any = llm.model.decoder  # the CPU's
    config = llm.model.plan.config
    layers = [decoder.layers[i] for i in config.moe_layer_ids]
    for rows in ROWS:
        inputs = itertools.cycle(torch.randn(NUM_INPUTS, rows, config.hidden_size).to(decoder.dtype))

        def run(inputs: Iterator[torch.Tensor] = inputs) -> None:
            x = next(inputs)  # other rows each time, so that they go to other experts
            for layer in layers:
                normed = rms_norm(x, layer.post_attention_norm, config.rms_norm_eps)
                x = add_residual(x, layer.mlp(normed, [x.shape[0]])[0])

        us = _us(run) / len(layers)
        yield _row("experts_half", rows, us, shape.num_topk * shape.expert_elements)


def _around(llm: LLM, shape: ModelShape) -> Iterator[_Row]:
    """A decode step of the engine without layers, by sequences."""
    from moe_runtime.engine.engine import Engine
    from moe_runtime.engine.request import SamplingParams, make_request

    engine, decoder = llm.engine, llm.model.decoder
    assert isinstance(engine, Engine), "one rank leads itself"
    runner: Any = engine.runner
    kept = decoder.layers, runner.kv_cache.layers, runner.expert_load
    decoder.layers, runner.kv_cache.layers, runner.expert_load = [], [], _Uncounted()
    try:
        for rows in AROUND_ROWS:
            params = SamplingParams(max_tokens=LAUNCHES + WARM_UPS + 2, ignore_eos=True, seed=0)
            for i in range(rows):
                engine.add_request(make_request(f"{rows}-{i}", [1], params, llm.limits))
            engine.step()
            us = _us(lambda: engine.step())
            engine.abort_all()
            engine.step()
            yield _row("around", rows, us, shape.vocab * shape.hidden)
    finally:
        decoder.layers, runner.kv_cache.layers, runner.expert_load = kept


class _Uncounted:
    """Takes routing that no layer has written."""

    def add(self, routing: object) -> None:
        """Counts nothing."""

    def before_step(self, view: object) -> None:
        """Has no window."""

    def take(self) -> tuple[()]:
        """Has nothing to tell."""
        return ()


def _row(component: str, rows: int, us: float, elements: float, **more: float) -> _Row:
    """With the products of ``elements`` weights, by which other models' times are scaled."""
    flops = int(2 * rows * elements)
    return {"component": component, "rows": rows, **more, "us": round(us, 1), "bytes": 0, "flops": flops}


def _us(run: Callable[[], object]) -> float:
    """Median microseconds of this thread: a rank computes on one, and other work on the machine does not count."""
    times = []
    for i in range(LAUNCHES + WARM_UPS):
        start_s = time.thread_time()
        run()
        if i >= WARM_UPS:
            times.append(1e6 * (time.thread_time() - start_s))
    return statistics.median(times)
