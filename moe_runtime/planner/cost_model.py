"""Time of one step of the engine, component by component, from times of kernels and transports alone. numpy only.

A step is what all ranks of one expert-parallel group do between two exchanges of the step vector. Every layer waits for
the busiest rank, so rows, keys and pairs are those of the busiest one. ``CostModel.step_us`` takes arrays, one element
per case; ``CostModel.step_seconds`` takes the sequences of every rank, as the scheduler has them.

Symbols: H hidden, K slots, W ranks (EP size), tp ranks that share a batch; a *group* is tp ranks, with one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moe_runtime.comm.exchange_bytes import MAX_GRAPH_ROWS
from moe_runtime.comm.sum_transport import has_parts_to_add
from moe_runtime.planner.attention_windows import causal_pairs, kinds_of_windows
from moe_runtime.planner.exchange_cost import ExchangeCost, Transport, transport_of
from moe_runtime.planner.hardware import Hardware
from moe_runtime.planner.roofline import FloatArray, kernel_curves
from moe_runtime.planner.routing_load import peak_experts, peak_pairs
from moe_runtime.planner.shapes import ModelShape
from moe_runtime.planner.tp_cost import TensorParallelCost

__all__ = ["BoolArray", "CostModel", "ScheduledTokens", "StepCost", "StepLoad", "Topology"]

ROW_PARTS = 2
"""Fixed parts of a row-parallel layer; kernels/gemm.py, which needs torch, defines them."""
MAX_DECODE_ROWS = 256
"""Rows of the decode form; layers/cuda_buffers.py defines them."""
EAGER_LAUNCHES, EAGER_LAUNCH_US = 10, 50.0
"""Kernels of a layer, the host's time for each in a step that is no graph: an H200's host, docs/benchmarks.md."""

BoolArray = npt.NDArray[np.bool_]
ScheduledTokens = tuple[int, int, bool]
"""Of one sequence: tokens that run, keys that the last of them sees, whether it decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where a model runs.

    Attributes:
        ep_size: Ranks over which the experts are spread: all of a replica.
        tp: Consecutive ranks that share attention, dense layers and vocabulary.
        num_redundant_experts: Copies in each layer beyond one per expert.
        level: ``topology``; ``batch``, at which ranks may pre-sum; or ``none``: pre-sums whatever the placement, and
            the fastest kernels that were measured, invariant or not.
        transport: What moves rows; by default what the dispatcher would take.
        dispatch_item_bytes, max_nodes: As ``ExchangeCost`` has them.
    """

    ep_size: int
    tp: int = 1
    num_redundant_experts: int = 0
    level: str = "topology"
    transport: Transport | None = None
    dispatch_item_bytes: float | None = None
    max_nodes: int | None = None

    @property
    def num_groups(self) -> int:
        """Batches that run side by side."""
        return self.ep_size // self.tp

    @property
    def adds_shards(self) -> bool:
        """Whether ranks of a group add the sums of their shards, by the engine's rule."""
        return has_parts_to_add(self.tp, self.level, ROW_PARTS)

    @property
    def presums(self) -> bool:
        """Whether ranks add slots before they travel, by the rule of comm/multiple_reduction.py."""
        is_allowed = self.level == "none" or (self.level == "batch" and not self.num_redundant_experts)
        return is_allowed and self.ep_size > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """What a step has to do; every field an array of one shape, or a number.

    Attributes:
        decode_rows: Sequences of the busiest group that take one token.
        decode_keys: By kind of window (``CostModel.windows``): keys that they read.
        prefill_rows: Tokens of prompts of the busiest group.
        prefill_pairs: By kind of window: (token, key) pairs of their attention.
        total_rows: Tokens of all groups.
        wanted_rows: Rows of the busiest group whose logits are wanted.
        longest_keys: Keys of the longest sequence that decodes; None where all are equally long.
    """

    decode_rows: FloatArray
    decode_keys: Sequence[FloatArray]
    prefill_rows: FloatArray
    prefill_pairs: Sequence[FloatArray]
    total_rows: FloatArray
    wanted_rows: FloatArray
    longest_keys: FloatArray | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Microseconds of a step by component: of the device, and of the host beside it."""

    device_us: dict[str, FloatArray] = field(default_factory=dict)
    host_us: FloatArray
    host_is_hidden: bool

    @property
    def us(self) -> FloatArray:
        """Of the step: the longer of device and host where one runs beside the other, else their sum."""
        device = sum(self.device_us.values(), start=np.zeros(1)) if self.device_us else np.zeros(1)
        return np.maximum(device, self.host_us) if self.host_is_hidden else device + self.host_us


class CostModel:
    """Steps of one model on one kind of device.

    Args:
        shape: Model.
        hardware: Device.
        topology: Ranks, copies, invariance level.
        greedy: Requests take the most likely token; sampling costs more.
    """

    def __init__(
        self, shape: ModelShape, hardware: Hardware, topology: Topology, *, greedy: bool = False
    ) -> None:
        self.shape, self.hardware, self.topology, self.greedy = shape, hardware, topology, greedy
        self.curves = kernel_curves(hardware, unpinned=topology.level == "none")
        self.windows = kinds_of_windows(shape)
        self.num_physical = shape.num_experts + topology.num_redundant_experts
        self.num_slots = -(-self.num_physical // topology.ep_size)
        self.small_kernel_us = self.curves["merge_residual_norm"].latency_us
        transport = topology.transport or transport_of(hardware, topology.ep_size)
        self.exchange = ExchangeCost(
            shape,
            hardware,
            topology.ep_size,
            transport,
            presums=topology.presums,
            small_kernel_us=self.small_kernel_us,
            dispatch_item_bytes=topology.dispatch_item_bytes,
            max_nodes=topology.max_nodes,
        )
        self.tensor_parallel = TensorParallelCost(
            shape,
            hardware,
            topology.tp,
            adds_shards=topology.adds_shards,
            transport=topology.transport,
            small_kernel_us=self.small_kernel_us,
        )
        self._host = _host_points(hardware, topology.tp)
        self._row_us: dict[tuple[int, bool], float] = {}
        self._expert_us: dict[tuple[int, int, float], float] = {}

    def step_us(self, load: StepLoad, balancedness: FloatArray | float = 1.0) -> StepCost:
        """Cost of steps.

        Args:
            load: What they have to do.
            balancedness: Mean over peak load of the ranks that the experts' skew leaves after placement, in (0, 1].
        """
        rows = load.decode_rows + load.prefill_rows
        prefills = load.prefill_rows > 0
        device = {
            **self._attention_dense(rows, prefills),
            "attention": self._attention(load),
            **self._moe(rows, load.total_rows, balancedness),
            **self._dense_layers(rows),
            **self._ends(rows, load.wanted_rows),
        }
        if self.topology.tp > 1:
            device |= self._tp(rows, load.wanted_rows)
        return StepCost(
            device_us=device,
            host_us=self.host_us(rows),
            host_is_hidden=self.host_is_hidden,
        )

    def step_seconds(self, step: Sequence[Sequence[ScheduledTokens]], balancedness: float = 1.0) -> float:
        """Seconds of one step, given what every group runs; fast enough to call for each step of a trace.

        Args:
            step: For each group its sequences: (new tokens, keys that the last of them sees, whether it decodes).
            balancedness: As ``step_us`` takes it.
        """
        num_groups, num_kinds = len(step), len(self.windows)
        decodes, new, sequences, longest = (np.zeros(num_groups) for _ in range(4))
        keys, pairs = np.zeros((2, num_kinds, num_groups))
        for i, group in enumerate(step):
            sequences[i] = len(group)
            for num_tokens, num_keys, is_decode in group:
                new[i] += num_tokens
                decodes[i] += is_decode
                longest[i] = max(longest[i], num_keys * is_decode)
                for kind, (window, _) in enumerate(self.windows):
                    if is_decode:
                        keys[kind, i] += num_keys if window is None else min(num_keys, window)
                    else:
                        pairs[kind, i] += causal_pairs(num_tokens, num_keys, window)
        return self.groups_seconds(decodes, keys, new - decodes, pairs, sequences, balancedness, longest)

    def groups_seconds(
        self,
        decode_rows: FloatArray,
        decode_keys: FloatArray,
        prefill_rows: FloatArray,
        prefill_pairs: FloatArray,
        wanted_rows: FloatArray,
        balancedness: float = 1.0,
        longest_keys: FloatArray | None = None,
    ) -> float:
        """``step_seconds`` from sums: for callers that keep them from step to step. What recurs is kept.

        Args:
            decode_rows, prefill_rows, wanted_rows, longest_keys: ``[groups]``, as ``StepLoad`` has them.
            decode_keys, prefill_pairs: ``[kinds of window, groups]``.
            balancedness: As ``step_us`` takes it.
        """
        longest = None if longest_keys is None else longest_keys[None]
        sums = decode_rows, decode_keys[:, None], prefill_rows, prefill_pairs, wanted_rows
        return float(self.steps_seconds(*sums, balancedness, longest)[0])

    def steps_seconds(
        self,
        decode_rows: FloatArray,
        decode_keys: FloatArray,
        prefill_rows: FloatArray,
        prefill_pairs: FloatArray,
        wanted_rows: FloatArray,
        balancedness: float = 1.0,
        longest_keys: FloatArray | None = None,
    ) -> FloatArray:
        """``[steps]`` seconds of steps that differ in the keys of their decodes alone.

        Args:
            decode_keys, longest_keys: ``[kinds of window, steps, groups]`` and ``[steps, groups]``; the others as
                ``groups_seconds`` takes them.
        """
        new = decode_rows + prefill_rows
        rows, total = int(new.max(initial=0)), int(new.sum())
        if total == 0:
            return np.zeros(decode_keys.shape[1])
        load = StepLoad(
            decode_rows=decode_rows,
            decode_keys=list(decode_keys),
            prefill_rows=prefill_rows,
            prefill_pairs=list(prefill_pairs),
            total_rows=new,
            wanted_rows=wanted_rows,
            longest_keys=longest_keys,
        )
        rows_us = self._rows_us(rows, bool(prefill_rows.any()), int(wanted_rows.max()))
        device_us = np.zeros(decode_keys.shape[1]) + self._attention(load).max(axis=-1)
        device_us += self._experts_us(rows, total, balancedness) + rows_us
        host_us = float(self.host_us(_number(rows)))
        us: FloatArray = np.maximum(device_us, host_us) if self.host_is_hidden else device_us + host_us
        return 1e-6 * us

    @property
    def host_is_hidden(self) -> bool:
        """The host works beside the device, on the next step."""
        return self.hardware.kind == "gpu" and self.topology.tp == 1

    def host_us(self, rows: FloatArray) -> FloatArray:
        """Of planning and taking results, 0 where not measured; launches one by one where the host is ahead."""
        launches_us = self.shape.num_layers * EAGER_LAUNCHES * EAGER_LAUNCH_US
        if self.exchange.transport == "deepep":  # which runs without graphs
            return np.full_like(rows, launches_us, dtype=np.float64)
        most = MAX_DECODE_ROWS if self.exchange.transport == "collective" else MAX_GRAPH_ROWS
        is_eager = self.host_is_hidden & (np.asarray(rows) > most)
        return self._results_us(rows).clip(launches_us * is_eager)

    def _results_us(self, rows: FloatArray) -> FloatArray:
        """Of planning and taking results, as measured on steps that are graphs."""
        if not len(self._host):
            return np.zeros_like(rows, dtype=np.float64)
        known, us = self._host.T
        slope = (us[-1] - us[-2]) / (known[-1] - known[-2]) if len(us) > 1 else 0.0
        past = np.clip(np.asarray(rows) - known[-1], 0, None) * (np.asarray(rows) <= MAX_DECODE_ROWS)
        found: FloatArray = np.interp(rows, known, us) + past * max(0.0, slope)
        return found

    def sources(self) -> dict[str, str]:
        """Of every component's time."""
        kernels = self.curves["dense"].source
        return {
            "kernels": kernels,
            "exchange": self.exchange.source,
            "host": self.hardware.sources.get("host", "modelled: not counted"),
            **self.tensor_parallel.sources(),
            "peaks of routing": "modelled: uniform routing by chance, and balancedness",
        }

    # -- components, microseconds over all layers ---------------------------------------------------------------------

    def _gemm(self, component: str, rows: FloatArray, n: float, k: float, item: float) -> FloatArray:
        """A dense product, weights of ``item`` bytes."""
        act = self.shape.activation_bytes
        num_bytes = item * n * k + act * rows * (n + k)
        floor_us = np.maximum(
            num_bytes / self.hardware.bytes_per_us, 2 * rows * n * k / self.hardware.flops_per_us(item)
        )
        return self.curves[component].us(rows, floor_us)

    def _moved(
        self, component: str, rows: FloatArray, bytes_per_row: float, flops_per_row: float = 0
    ) -> FloatArray:
        """A kernel of activations."""
        floor_us = np.maximum(
            rows * bytes_per_row / self.hardware.bytes_per_us,
            rows * flops_per_row / self.hardware.flops_per_us(2),
        )
        return self.curves[component].us(rows, floor_us)

    def _attention_dense(self, rows: FloatArray, prefills: BoolArray) -> dict[str, FloatArray]:
        shape, attention, tp = self.shape, self.shape.attention, self.topology.tp
        hidden, layers, item, act = (
            shape.hidden,
            shape.num_layers,
            shape.item_bytes.dense,
            shape.activation_bytes,
        )
        if attention.kind == "mla":
            latent = attention.q_lora_rank + attention.kv_lora_rank + attention.rope_dim
            qkv = self._gemm("dense", rows, latent, hidden, item)
            query_in = attention.q_lora_rank or hidden
            qkv = qkv + self._gemm("dense", rows, attention.query_width / tp, query_in, item)
            expand = attention.num_heads / tp * (attention.head_dim + attention.v_head_dim)
            qkv = qkv + self._gemm("dense", rows, expand, attention.kv_lora_rank, item)
            width = attention.query_width / tp + attention.cache_width
        else:
            kv_heads = max(1, attention.num_kv_heads / tp)
            width = attention.query_width / tp + 2 * kv_heads * attention.head_dim
            qkv = self._gemm("dense", rows, width, hidden, item)
        rope = np.where(prefills, self._moved("rope_and_write", rows, 2 * act * width), 0.0)
        return {
            "qkv": layers * qkv,
            "o_proj": layers * self._gemm("row_parallel", rows, hidden, attention.output_width / tp, item),
            "norms": layers
            * (self._moved("merge_residual_norm", rows, hidden * (4 * ROW_PARTS + 3 * act)) + rope),
        }

    def _attention(self, load: StepLoad) -> FloatArray:
        us = np.zeros_like(load.decode_rows, dtype=np.float64)
        for (_, layers), keys, pairs in zip(self.windows, load.decode_keys, load.prefill_pairs, strict=True):
            if np.any(load.decode_rows > 0):
                us = us + layers * np.where(
                    load.decode_rows > 0, self._decode_us(load.decode_rows, keys), 0.0
                )
            if np.any(load.prefill_rows > 0):
                rows_us = self._rows_attention_us(load.prefill_rows, pairs)
                us = us + layers * np.where(load.prefill_rows > 0, rows_us, 0.0)
        return us

    def _decode_us(self, rows: FloatArray, keys: FloatArray) -> FloatArray:
        """Of a layer: rows of one token each that see so many keys together."""
        attention, tp = self.shape.attention, self.topology.tp
        if attention.kind == "mla":
            key_bytes = attention.cache_width * self.shape.item_bytes.kv
            flops = 2 * attention.num_heads / tp * (attention.cache_width + attention.kv_lora_rank)
        else:
            kv_heads = max(1, attention.num_kv_heads / tp)
            key_bytes = 2 * kv_heads * attention.head_dim * self.shape.item_bytes.kv
            flops = 4 * attention.num_heads / tp * attention.head_dim
        width = self.shape.activation_bytes * (attention.query_width + attention.output_width) / tp
        num_bytes = keys * key_bytes + rows * width
        floor_us = np.maximum(
            num_bytes / self.hardware.bytes_per_us, keys * flops / self.hardware.flops_per_us(2)
        )
        return self.curves["attend_decode"].us(num_bytes, floor_us)

    def _rows_attention_us(self, rows: FloatArray, pairs: FloatArray) -> FloatArray:
        """Of a layer: rows of prompts, causal."""
        attention, tp = self.shape.attention, self.topology.tp
        per_pair = 2 * attention.num_heads / tp * (attention.head_dim + attention.rope_dim)
        per_pair += 2 * attention.num_heads / tp * (attention.v_head_dim or attention.head_dim)
        width = attention.query_width + attention.output_width + attention.cache_width
        num_bytes = self.shape.activation_bytes * rows * width / tp
        flops = pairs * per_pair
        floor_us = np.maximum(num_bytes / self.hardware.bytes_per_us, flops / self.hardware.flops_per_us(2))
        return self.curves["attend_rows"].us(flops, floor_us)

    def _moe(
        self, rows: FloatArray, total_rows: FloatArray, balancedness: FloatArray | float
    ) -> dict[str, FloatArray]:
        shape, size, layers = self.shape, self.topology.ep_size, self.shape.num_moe_layers
        hidden, width, act, topk = shape.hidden, shape.expert_width, shape.activation_bytes, shape.num_topk
        home = np.ceil(rows / self.topology.tp)
        pairs = peak_pairs(total_rows * topk, size, balancedness)
        touched = np.minimum(peak_experts(total_rows, self.num_physical, topk, self.num_slots), pairs)
        tokens = np.minimum(total_rows, pairs)
        item = shape.item_bytes.expert
        rate = self.hardware.flops_per_us(item)
        per_expert = pairs / self.num_slots

        def grouped(component: str, weights: float, moved: FloatArray) -> FloatArray:
            num_bytes = item * touched * weights + act * moved
            floor_us = np.maximum(num_bytes / self.hardware.bytes_per_us, 2 * pairs * weights / rate)
            return self.curves[component].us(per_expert, floor_us)

        up_us = grouped("gate_up", 2 * width * hidden, tokens * hidden + pairs * width)
        down_us = grouped("down", width * hidden, pairs * (width + hidden))
        found = {
            "router": layers
            * (
                self._gemm("router", home, shape.num_experts, hidden, act)
                + self._moved("topk", home, 4 * (shape.num_experts + 2 * topk))
            ),
            "experts": layers * (up_us + down_us),
            "combine": layers * self._moved("combine_residual_norm", home, act * hidden * (topk + 3)),
        }
        if shape.shared_width:
            shared = shape.shared_width / self.topology.tp
            up = self._gemm("dense", rows, 2 * shared, hidden, shape.item_bytes.dense)
            found["shared experts"] = layers * (
                up + self._gemm("row_parallel", rows, hidden, shared, shape.item_bytes.dense)
            )
        if size > 1:
            found["dispatch + combine"] = layers * self.exchange.us(home)
        return found

    def _dense_layers(self, rows: FloatArray) -> dict[str, FloatArray]:
        shape, layers = self.shape, self.shape.num_dense_layers
        if not layers:
            return {}
        width = shape.dense_width / self.topology.tp
        up = self._gemm("dense", rows, 2 * width, shape.hidden, shape.item_bytes.dense)
        down = self._gemm("row_parallel", rows, shape.hidden, width, shape.item_bytes.dense)
        norm = self._moved(
            "merge_residual_norm", rows, shape.hidden * (4 * ROW_PARTS + 3 * shape.activation_bytes)
        )
        return {"dense layers": layers * (up + down + norm)}

    def _ends(self, rows: FloatArray, wanted: FloatArray) -> dict[str, FloatArray]:
        shape = self.shape
        vocab = shape.vocab / self.topology.tp
        head = self._gemm("lm_head", wanted, vocab, shape.hidden, shape.item_bytes.other)
        sampling = self._moved("greedy" if self.greedy else "sample", wanted, 4 * shape.vocab)
        return {
            "embedding": self._moved("embed_norm", rows, 3 * shape.activation_bytes * shape.hidden),
            "lm_head": np.where(wanted > 0, head, 0.0),
            "sampling": np.where(wanted > 0, sampling, 0.0),
        }

    def _tp(self, rows: FloatArray, wanted: FloatArray) -> dict[str, FloatArray]:
        """What a group adds and moves of its own; parts of o_proj, and of down projections that are sharded."""
        num_sums = self.shape.num_layers + self.shape.num_dense_layers
        return {
            "tp sums": num_sums * self.tensor_parallel.sums_us(rows),
            "tp moves": self.tensor_parallel.moves_us(rows, wanted),
        }

    # -- single steps, with what recurs kept --------------------------------------------------------------------------

    def _rows_us(self, rows: int, prefills: bool, wanted: int) -> float:
        found = self._row_us.get((rows, prefills))
        if found is None:
            x = _number(rows)
            parts = [
                *self._attention_dense(x, np.asarray(prefills)).values(),
                *self._dense_layers(x).values(),
            ]
            parts.append(self._ends(x, _number(0))["embedding"])
            found = self._row_us[rows, prefills] = float(sum(parts))
        key = (-1 - wanted, False)
        if key not in self._row_us:
            ends = self._ends(_number(rows), _number(wanted))
            self._row_us[key] = float(ends["lm_head"] + ends["sampling"])
        found += self._row_us[key]
        if self.topology.tp > 1:
            found += float(sum(self._tp(_number(rows), _number(wanted)).values()))
        return found

    def _experts_us(self, rows: int, total: int, balancedness: float) -> float:
        key = (rows, total, round(balancedness, 3))
        found = self._expert_us.get(key)
        if found is None:
            parts = self._moe(_number(rows), _number(total), balancedness)
            if len(self._expert_us) > 2**20:  # memory of a long trace stays flat
                self._expert_us.clear()
            found = self._expert_us[key] = float(sum(parts.values()))
        return found


def _number(value: float) -> FloatArray:
    return np.asarray(value, dtype=np.float64)


def _host_points(hardware: Hardware, tp: int) -> FloatArray:
    """``[points, 2]``: rows and microseconds, of the group's size or of the next smaller one that was timed."""
    sizes = [int(row.get("tp", 1)) for row in hardware.host]
    nearest = max((size for size in sizes if size <= tp), default=1)
    rows = [row for row, size in zip(hardware.host, sizes, strict=True) if size == nearest]
    return np.array([(row["rows"], row["us"]) for row in rows], dtype=np.float64)
