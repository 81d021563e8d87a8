"""Times of a CPU rank's parts, each alone: attention and experts of one layer, and the step around the layers.

Run by ``moe-runtime calibrate``. "Around" is the engine's own step without the layers: scheduling, the batch,
embedding, head, sampling, counts of experts, results.

Each part has a clock of its own and is timed as a step meets it, with caches that the other parts have just used:
between two calls of a part the others run, while its clock stands. In a loop by itself the part around the layers
takes 30 to 40 % less than in a step, attention 5 to 15 %. Sequences of a step are of different lengths, and few end
where a KV block does: attention is timed with equal contexts that end in the middle of a block, and with contexts
spread evenly up to twice their mean, where most blocks of keys are met by some of the sequences alone.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moe_runtime.planner.shapes import ModelShape

if TYPE_CHECKING:
    from moe_runtime.engine.llm import LLM

__all__ = ["cpu_kernel_times"]

ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPTS = (16, 32, 64, 256)
CONTEXTS = (96, 480)
LAUNCHES = 15
WARM_UPS = 3
NUM_INPUTS = 8
NUM_CACHES = 4
BLOCK_TOKENS = 64

_Row = dict[str, Any]


def cpu_kernel_times(llm: LLM, shape: ModelShape) -> list[_Row]:
    """Rows of a device file's ``kernels``: component, rows, keys or pairs, microseconds, bytes and products.

    Of rows with ``keys``, ``longest`` is the longest sequence's.

    Args:
        llm: One rank with the whole model; its layers are used, its requests must have ended.
        shape: Of the model.
    """
    import torch

    with torch.inference_mode():
        return [*_halves(llm, shape), *_around(llm, shape)]


def _halves(llm: LLM, shape: ModelShape) -> Iterator[_Row]:
    """The two halves of a layer: norm, attention and residual; norm, router, experts, sum and residual."""
    half = _Halves(llm)
    most = llm.model.plan.max_model_len
    contexts = sorted({min(context, most) for context in CONTEXTS})
    mean = min(sum(contexts) // len(contexts), most // 2)
    elements = shape.attention.shared_elements(shape.hidden) + shape.attention.kv_elements(shape.hidden)
    experts: dict[int, list[float]] = {}

    def times(lengths: list[int], ends: list[int]) -> float:
        attention_us, experts_us = half.us(lengths, ends)
        experts.setdefault(sum(lengths), []).append(experts_us)
        return attention_us

    for rows in ROWS:
        spread = [max(1, mean * (2 * i + 1) // rows) for i in range(rows)]
        for ends in [*([context] * rows for context in contexts), *([spread] if rows > 1 else [])]:
            us = times([1] * rows, ends)
            yield _row("attention_half", rows, us, elements, keys=sum(ends), longest=max(ends))
    for length, before in [*((length, 0) for length in PROMPTS), (PROMPTS[-2], contexts[-1])]:
        end = before + length
        if end <= most:
            pairs = length * (before + end + 1) // 2
            yield _row("attention_half", length, times([length], [end]), elements, pairs=pairs)
    for rows, several in sorted(experts.items()):
        yield _row("experts_half", rows, statistics.median(several), shape.num_topk * shape.expert_elements)


class _Halves:
    """Runs all layers, with a clock for each half."""

    def __init__(self, llm: LLM) -> None:
        self.decoder: Any = llm.model.decoder  # the CPU's
        self.config = llm.model.plan.config
        self.caches: list[Any] = []

    def us(self, lengths: list[int], ends: list[int]) -> tuple[float, float]:
        """Median microseconds of a layer's attention and experts, for tokens that end at those positions."""
        import torch

        from moe_runtime.kernels.attention import make_attention_plan
        from moe_runtime.kernels.rms_norm import add_residual, rms_norm
        from moe_runtime.layers.mlp import MoE

        decoder, eps = self.decoder, self.config.rms_norm_eps
        tables, first = [], 0
        for end in ends:
            blocks = -(-end // BLOCK_TOKENS)
            tables.append(list(range(first, first + blocks)))
            first += blocks
        starts = [end - length for length, end in zip(lengths, ends, strict=True)]
        places = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        positions = torch.tensor([p for each in places for p in each])
        slots = torch.tensor(
            [
                table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS
                for table, each in zip(tables, places, strict=True)
                for p in each
            ]
        )
        plan = make_attention_plan(lengths, starts, tables, self.config.num_query_heads_per_kv_head)
        caches = itertools.cycle(self._caches(first))
        inputs = itertools.cycle(  # other rows each time, so that they go to other experts
            torch.randn(NUM_INPUTS, len(positions), self.config.hidden_size).to(decoder.dtype)
        )
        routing = torch.empty(len(positions), self.config.num_experts_per_tok, dtype=torch.int16)
        attention, experts = _Clock(), _Clock()
        for _ in range(LAUNCHES + WARM_UPS):
            x = next(inputs)
            for layer in decoder.layers:
                with attention:
                    normed = rms_norm(x, layer.input_norm, eps)
                    kv = next(caches)
                    branch = layer.attention(normed, positions, slots, plan, decoder.rotary, *kv)
                    x = add_residual(x, branch)
                with experts if isinstance(layer.mlp, MoE) else _Clock():
                    normed = rms_norm(x, layer.post_attention_norm, eps)
                    if isinstance(layer.mlp, MoE):
                        branch, topk_idx = layer.mlp(normed, [x.shape[0]])
                        routing.copy_(topk_idx)
                    else:
                        branch = layer.mlp(normed)
                    x = add_residual(x, branch)
            attention.lap()
            experts.lap()
        num_layers, num_moe_layers = len(decoder.layers), len(self.config.moe_layer_ids)
        return attention.median_us() / num_layers, experts.median_us() / num_moe_layers

    def _caches(self, num_blocks: int) -> list[Any]:
        """Of some layers, in turn for all of them."""
        import torch

        if not self.caches or self.caches[0][0].shape[0] < num_blocks:
            config = self.config
            shape = num_blocks, config.num_kv_heads, BLOCK_TOKENS, config.head_dim
            self.caches = [
                [torch.zeros(shape, dtype=self.decoder.dtype) for _ in range(2)] for _ in range(NUM_CACHES)
            ]
        return self.caches


def _around(llm: LLM, shape: ModelShape) -> Iterator[_Row]:
    """A decode step of the engine without its layers, which run while the clock stands; by sequences."""
    from moe_runtime.engine.engine import Engine
    from moe_runtime.engine.request import SamplingParams, make_request

    engine: Any = llm.engine
    decoder: Any = llm.model.decoder
    assert isinstance(engine, Engine), "one rank leads itself"
    forward, layers, clock = decoder.forward, decoder.layers, _Clock()

    def without_layers(batch: Any, kv_cache: Any, routing: Any = None) -> Any:
        decoder.layers = []
        forward(batch, [])  # embedding and last norm
        decoder.layers = layers
        with clock.standing():
            return forward(batch, kv_cache, routing)

    decoder.forward = without_layers
    try:
        for rows in (rows for rows in ROWS if rows <= engine.scheduler.config.max_num_seqs):
            params = SamplingParams(max_tokens=LAUNCHES + WARM_UPS + 2, ignore_eos=True, seed=0)
            for i in range(rows):
                engine.add_request(make_request(f"{rows}-{i}", [1], params, llm.limits))
            engine.step()
            clock.reset()
            for _ in range(LAUNCHES + WARM_UPS):
                assert engine.scheduler.num_unfinished == rows, "a sequence has ended"
                with clock:
                    engine.step()
                clock.lap()
            engine.abort_all()
            engine.step()
            yield _row("around", rows, clock.median_us(), shape.vocab * shape.hidden)
    finally:
        del decoder.forward
        decoder.layers = layers


class _Clock:
    """Time of this thread while it runs: a rank computes on one, and other work on the machine does not count."""

    def __init__(self) -> None:
        self._laps: list[float] = []
        self._sum_s = self._start_s = 0.0

    def __enter__(self) -> None:
        self._start_s = time.thread_time()

    def __exit__(self, *error: object) -> None:
        self._sum_s += time.thread_time() - self._start_s

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """Within ``with``: what does not count."""
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def reset(self) -> None:
        """Forget all laps."""
        self._laps.clear()

    def lap(self) -> None:
        """What has run since the last lap is one of them."""
        self._laps.append(self._sum_s)
        self._sum_s = 0.0

    def median_us(self) -> float:
        """Of the laps after the warm-ups."""
        return 1e6 * statistics.median(self._laps[WARM_UPS:])


def _row(component: str, rows: int, us: float, elements: float, **more: float) -> _Row:
    """With the products of ``elements`` weights, by which other models' times are scaled."""
    flops = int(2 * rows * elements)
    return {"component": component, "rows": rows, **more, "us": round(us, 1), "bytes": 0, "flops": flops}
