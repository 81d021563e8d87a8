"""The decoder on one GPU: the same trees whether a step is a graph of decode rows or any mix of rows.

Two forms run the model. ``decode`` takes one row per sequence, up to ``MAX_DECODE_ROWS``, and launches nine kernels a
layer on buffers of fixed address, so that it can be captured in a graph. ``mixed`` takes any rows of any sequences.
They differ in schedules alone: a row has the same bits in both.

Roundings and trees are those of the kernels' files. The first kernel of a form is launched plainly, all others
dependent on the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch

from moe_runtime.comm.gpu_exchange import StepShape
from moe_runtime.kernels.attention_tree_triton import check_heads
from moe_runtime.kernels.attention_triton import DecodeSchedule, attend_decode, decode_workspace
from moe_runtime.kernels.experts_triton import MAX_CAPACITY
from moe_runtime.kernels.gemm import PARTS
from moe_runtime.kernels.gemm_triton import dense_gemm, dense_gemm_parts, vendor_gemm
from moe_runtime.kernels.gpu_schedules import GpuSchedules, device_kind
from moe_runtime.kernels.norm_triton import embed_norm, merge_residual_norm
from moe_runtime.kernels.prefill_attention_triton import RowSchedule, attend_rows
from moe_runtime.kernels.rope_write_triton import rope_and_write
from moe_runtime.kernels.router_triton import router_logits
from moe_runtime.kernels.topk_triton import topk
from moe_runtime.layers.cuda_experts import Experts, LayerExperts, LocalExperts
from moe_runtime.layers.rotary import RotaryTable
from moe_runtime.models.model_config import ModelConfig

__all__ = [
    "MAX_DECODE_ROWS",
    "CudaDecoder",
    "ExpertReader",
    "ExpertsMaker",
    "KVCaches",
    "MixedInput",
    "RowTiles",
    "check_supported",
    "max_split_rows",
]

MAX_DECODE_ROWS = MAX_CAPACITY

ExpertReader = Callable[[str, int, int | None], torch.Tensor]
"""``(role, layer_idx, logical expert or None)`` to the checkpoint's tensor, on any device."""

ExpertsMaker = Callable[[int], Experts]
"""From the most rows of a step to the experts' half of all layers; a collective where ranks are several."""

KVCaches = SequenceOf[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTiles:
    """Tiles of one schedule of ``attend_rows``: ``[num_tiles, 4]`` int32 on the device."""

    schedule: RowSchedule
    tiles: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedInput:
    """A step of any rows, on the device; of none, where other ranks have some.

    Attributes:
        shape: What all ranks know of the step.
        token_ids, positions: ``[T]`` int32.
        slot_mapping: ``[T]`` int64.
        num_tokens: ``[1]`` int32, T.
        block_table: ``[num_seqs, max_blocks]`` int32.
        tiles: Every token is in one tile of one of them.
    """

    shape: StepShape
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_tokens: torch.Tensor
    block_table: torch.Tensor
    tiles: SequenceOf[RowTiles]


def check_supported(config: ModelConfig) -> None:
    """Raise ``ValueError`` for what the CPU runs and this path does not yet."""
    if len(config.moe_layer_ids) != config.num_layers:
        raise ValueError("layers without experts are not implemented on the GPU yet; use device cpu")
    check_heads(config.num_attention_heads, config.num_kv_heads, config.head_dim, None)


def max_split_rows(config: ModelConfig, device: torch.device) -> int:
    """Most rows of a decode step whose attention runs a program per chunk: more fill the GPU by themselves."""
    num_multiprocessors = 132
    if device.type == "cuda":
        num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return min(MAX_DECODE_ROWS, max(1, num_multiprocessors // config.num_kv_heads))


class CudaDecoder:
    """A model on one GPU.

    Attributes:
        max_split_rows: See the function of that name; ``workspace`` is for as many.
        pdl: Launch kernels dependent on the one before; a schedule.
        schedules: Decides the schedule of every launch.
        experts: The experts' half of every layer.

    Args:
        config: Model; every layer a mixture of experts.
        read: Gives tensors; read in the order of the layers.
        dtype: Model dtype.
        max_model_len: Longest context, in tokens.
        max_rows: Most tokens of a step.
        device: Where everything lives.
        schedules: The device's table; by default the one without an audit.
        local_experts: Logical experts to load; by default all.
        make_experts: Runs them, and gets rows from and to other ranks; by default all are here.

    Raises:
        ValueError: the model has something that this path does not implement.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: ExpertReader,
        dtype: torch.dtype,
        max_model_len: int,
        max_rows: int,
        device: torch.device,
        schedules: GpuSchedules | None = None,
        local_experts: SequenceOf[int] | None = None,
        make_experts: ExpertsMaker | None = None,
    ) -> None:
        check_supported(config)
        self.config = config
        self.dtype = dtype
        self.device = device
        self.pdl = device.type == "cuda"
        self.schedules = schedules or GpuSchedules(device_kind(device), dtype)
        rotary = RotaryTable(config.rope, config.head_dim, max_model_len)
        self.cos, self.sin = rotary.cos.to(device), rotary.sin.to(device)

        def load(role: str, layer_idx: int = -1) -> torch.Tensor:
            return read(role, layer_idx, None).to(device=device, dtype=dtype).contiguous()

        self.embedding = load("embed")
        self.lm_head = self.embedding if config.tie_word_embeddings else load("lm_head")
        self.layers = [
            _Layer(config, layer_idx, load, read, local_experts, device)
            for layer_idx in range(config.num_layers)
        ]
        norms = [layer.input_norm for layer in self.layers[1:]]
        self.next_norms = [*norms, load("final_norm").float()]
        self._make_experts = make_experts or self._all_local
        self._make_buffers(max(max_rows, MAX_DECODE_ROWS))
        self.max_split_rows = max_split_rows(config, device)
        self.workspace = decode_workspace(
            self.max_split_rows, config.num_attention_heads, config.head_dim, max_model_len, device
        )

    def _all_local(self, max_rows: int) -> Experts:
        return LocalExperts(self.config, self.schedules, max_rows, self.dtype, self.device)

    def _make_buffers(self, max_rows: int) -> None:
        self.buffers = _Buffers(self.config, max_rows, self.dtype, self.device)
        self.experts = self._make_experts(max_rows)

    def reserve_rows(self, max_rows: int) -> None:
        """Have room for steps of ``max_rows`` tokens, on one rank no more; graphs captured before are of no use then. A
        collective where ranks are several, whose common buffers only grow."""
        max_rows = max(max_rows, MAX_DECODE_ROWS)
        if self.buffers.max_rows == max_rows or (
            self.experts.num_processes > 1 and self.buffers.max_rows > max_rows
        ):
            return
        del self.buffers, self.experts  # their memory makes room for the next ones
        self._make_buffers(max_rows)

    def decode(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        block_table: torch.Tensor,
        num_tokens: torch.Tensor,
        kv_caches: KVCaches,
        attention: DecodeSchedule,
        logits: torch.Tensor,
        *,
        rehearse: bool = False,
    ) -> None:
        """One row per sequence, to logits; can be captured in a graph.

        Args:
            token_ids: ``[M]`` int32, -1 in inert rows.
            positions: ``[M]`` int32, -1 in inert rows.
            block_table: ``[M, max_blocks]`` int32.
            num_tokens: ``[1]`` int32 on the device; rows from there on are inert.
            kv_caches: Per layer.
            attention: Schedule of attention.
            logits: ``[M, vocab]`` float32, written; inert rows hold anything.
            rehearse: No step of anybody: other ranks do not take part.
        """
        config, eps, m = self.config, self.config.rms_norm_eps, token_ids.shape[0]
        b = self.buffers.rows(m)
        pdl, table = self.pdl, self.schedules
        hidden, query = config.hidden_size, b.attention.shape[1]
        o_proj = table.dense_parts(m, hidden, query, PARTS["row"])
        router, choice = table.router(m, hidden), table.topk(m)
        experts = self.experts.rehearsal() if rehearse else self.experts
        shape = StepShape.of_bucket(m, experts.num_processes)
        routed = experts.routed_rows(shape)
        experts.begin_step(pdl=False)
        embed_norm(token_ids, self.embedding, self.layers[0].input_norm, eps, b.residual, b.normed)
        for layer, next_norm, (k_cache, v_cache) in zip(self.layers, self.next_norms, kv_caches, strict=True):
            self._gemm(b.normed, layer.qkv, b.qkv, bias=layer.qkv_bias)
            attend_decode(
                b.qkv, k_cache, v_cache, positions, block_table, layer.q_norm, layer.k_norm, eps,
                self.cos, self.sin, b.attention,
                window=layer.window, workspace=self.workspace, schedule=attention, pdl=pdl,
            )  # fmt: skip
            dense_gemm_parts(b.attention, layer.o_proj, b.parts, schedule=o_proj, pdl=pdl)
            merge_residual_norm(
                b.parts, b.residual, layer.post_attention_norm, eps, b.residual, routed.x,
                bias=layer.o_bias, pdl=pdl,
            )  # fmt: skip
            router_logits(routed.x, layer.router, b.router_logits, schedule=router, pdl=pdl)
            topk(
                b.router_logits, num_tokens, config.num_experts_per_tok, config.norm_topk_prob,
                routed.ids, routed.weights, routed.slot_table, schedule=choice, pdl=pdl,
            )  # fmt: skip
            experts.run(
                layer.layer_idx, layer.experts, shape, num_tokens, b.residual, next_norm, b.normed, pdl=pdl
            )
        self._gemm(b.normed, self.lm_head, logits)

    def mixed(self, step: MixedInput, kv_caches: KVCaches) -> torch.Tensor:
        """Any rows, to hidden states ``[T, hidden]`` after the final norm (a view of a buffer)."""
        config, eps, num_tokens = self.config, self.config.rms_norm_eps, step.token_ids.shape[0]
        b = self.buffers.rows(num_tokens)
        pdl, table = self.pdl, self.schedules
        shape, experts = step.shape, self.experts
        routed = experts.routed_rows(shape)
        experts.begin_step(pdl=False)
        if num_tokens == 0:
            for layer, next_norm in zip(self.layers, self.next_norms, strict=True):
                experts.run(
                    layer.layer_idx,
                    layer.experts,
                    shape,
                    step.num_tokens,
                    b.residual,
                    next_norm,
                    b.normed,
                    pdl=pdl,
                )
            return b.normed
        hidden = config.hidden_size
        router, choice, rope = table.router(num_tokens, hidden), table.topk(num_tokens), table.rope()
        embed_norm(step.token_ids, self.embedding, self.layers[0].input_norm, eps, b.residual, b.normed)
        q = b.q.view(num_tokens, config.num_attention_heads, config.head_dim)
        for layer, next_norm, (k_cache, v_cache) in zip(self.layers, self.next_norms, kv_caches, strict=True):
            self._gemm(b.normed, layer.qkv, b.qkv, bias=layer.qkv_bias)
            rope_and_write(
                b.qkv, step.positions, step.slot_mapping, layer.q_norm, layer.k_norm, eps, self.cos, self.sin,
                k_cache, v_cache, q, schedule=rope, pdl=pdl,
            )  # fmt: skip
            for part in step.tiles:
                attend_rows(
                    q, k_cache, v_cache, part.tiles, step.block_table, b.attention,
                    window=layer.window, schedule=part.schedule, pdl=pdl,
                )  # fmt: skip
            self._gemm(b.attention, layer.o_proj, b.branch, parts=PARTS["row"], bias=layer.o_bias)
            merge_residual_norm(
                b.branch[:, None], b.residual, layer.post_attention_norm, eps, b.residual, routed.x, pdl=pdl
            )
            router_logits(routed.x, layer.router, b.router_logits, schedule=router, pdl=pdl)
            topk(
                b.router_logits, step.num_tokens, config.num_experts_per_tok, config.norm_topk_prob,
                routed.ids, routed.weights, routed.slot_table, schedule=choice, pdl=pdl,
            )  # fmt: skip
            experts.run(
                layer.layer_idx,
                layer.experts,
                shape,
                step.num_tokens,
                b.residual,
                next_norm,
                b.normed,
                pdl=pdl,
            )
        return b.normed

    def _gemm(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        out: torch.Tensor,
        *,
        parts: int = 1,
        bias: torch.Tensor | None = None,
    ) -> None:
        """``dense_gemm``; without a bias the vendor's, at the next row count that an audit allows, on rows of the same
        buffers."""
        m, (n, k) = x.shape[0], w.shape
        if bias is None:
            vendor = self.schedules.vendor(
                m, n, k, parts, float32_out=out.dtype == torch.float32, max_rows=min(_room(x), _room(out))
            )
            if vendor is not None:
                vendor_gemm(_rows_of(x, vendor.rows), w, _rows_of(out, vendor.rows), parts=parts)
                return
        schedule = self.schedules.dense(m, n, k, parts)
        dense_gemm(x, w, out, parts=parts, bias=bias, schedule=schedule, pdl=self.pdl)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` float32 from ``[rows, hidden]``."""
        out = torch.empty(hidden.shape[0], self.config.vocab_size, dtype=torch.float32, device=self.device)
        self._gemm(hidden.contiguous(), self.lm_head, out)
        return out


class _Layer:
    """One layer's weights on the device."""

    def __init__(
        self,
        config: ModelConfig,
        layer_idx: int,
        load: Callable[[str, int], torch.Tensor],
        read: ExpertReader,
        local_experts: SequenceOf[int] | None,
        device: torch.device,
    ) -> None:
        self.layer_idx = layer_idx
        self.window = config.sliding_windows[layer_idx]
        self.input_norm = load("input_norm", layer_idx).float()
        self.post_attention_norm = load("post_attention_norm", layer_idx).float()
        self.qkv = torch.cat([load(role, layer_idx) for role in ("q_proj", "k_proj", "v_proj")])
        self.o_proj = load("o_proj", layer_idx)
        self.qkv_bias: torch.Tensor | None = None
        self.o_bias: torch.Tensor | None = None
        if config.attention_bias:
            self.qkv_bias = torch.cat([load(role, layer_idx) for role in ("q_bias", "k_bias", "v_bias")])
            self.o_bias = load("o_bias", layer_idx)
        self.q_norm = load("q_norm", layer_idx).float() if config.qk_norm else None
        self.k_norm = load("k_norm", layer_idx).float() if config.qk_norm else None
        self.router = load("router", layer_idx)
        self.experts = LayerExperts.load(
            config,
            range(config.num_experts) if local_experts is None else local_experts,
            lambda role, expert: read(role, layer_idx, expert),
            self.qkv.dtype,
            device,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Views of the buffers for M rows; see ``_Buffers``."""

    residual: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    q: torch.Tensor
    attention: torch.Tensor
    branch: torch.Tensor
    parts: torch.Tensor
    router_logits: torch.Tensor


class _Buffers:
    """Activations of a step, at fixed addresses, shared by all layers."""

    def __init__(self, config: ModelConfig, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.max_rows = max_rows
        heads, kv_heads = config.num_attention_heads, config.num_kv_heads
        hidden, query = config.hidden_size, heads * config.head_dim

        def make(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        self.residual, self.normed, self.branch = (make(max_rows, hidden) for _ in range(3))
        self.qkv = make(max_rows, query + 2 * kv_heads * config.head_dim)
        self.q, self.attention = make(max_rows, query), make(max_rows, query)
        self.parts = make(MAX_DECODE_ROWS, PARTS["row"], hidden, kind=torch.float32)
        self.router_logits = make(max_rows, config.num_experts, kind=torch.float32)

    def rows(self, m: int) -> _Rows:
        """Views for M rows."""
        return _Rows(
            residual=self.residual[:m],
            normed=self.normed[:m],
            qkv=self.qkv[:m],
            q=self.q[:m],
            attention=self.attention[:m],
            branch=self.branch[:m],
            parts=self.parts[:m],
            router_logits=self.router_logits[:m],
        )


def _room(rows: torch.Tensor) -> int:
    """Rows in the storage of a buffer's view from its first one on."""
    elements = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
    return elements // rows.shape[1]


def _rows_of(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The first ``count`` rows of the buffer of which ``rows`` is a view from its first one on."""
    return rows.as_strided((count, rows.shape[1]), rows.stride(), rows.storage_offset())
