"""The decoder on one GPU: the same trees whether a step is a graph of decode rows or any mix of rows.

Two forms run the model. ``decode`` takes one row per sequence, up to ``MAX_DECODE_ROWS``, and launches nine kernels a
layer (eleven where ranks are several, thirteen where they share the attention) on buffers of fixed address, so that it
can be captured in a graph. ``mixed`` takes any rows of any sequences. They differ in schedules alone: a row has the
same bits in both. Both leave the step's routing in ``buffers.routing`` and add it to ``expert_counts``.

Several ranks may share the attention (``tensor_parallel``): a rank holds some heads, a part of o_proj (row_parallel.py
has the tree) and of the vocabulary; all run the same M rows, and row i has its mixture-of-experts home on rank i mod t.

Roundings and trees are those of the kernels' files. The first kernel of a form is launched plainly, all others
dependent on the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch

from moe_runtime.comm.agreement import all_or_none
from moe_runtime.comm.collective_exchange import rehearsal_group
from moe_runtime.comm.gpu_exchange import StepShape
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.errors import CapacityError
from moe_runtime.kernels.attention import slots_of
from moe_runtime.kernels.attention_tree_triton import check_heads
from moe_runtime.kernels.attention_triton import DecodeSchedule, attend_decode, decode_workspace
from moe_runtime.kernels.expert_count_triton import count_experts
from moe_runtime.kernels.gemm import PARTS
from moe_runtime.kernels.gemm_triton import dense_gemm, dense_gemm_parts, vendor_gemm
from moe_runtime.kernels.gpu_schedules import GpuSchedules, device_kind
from moe_runtime.kernels.norm_triton import embed_norm, merge_residual_norm, rms_norm
from moe_runtime.kernels.prefill_attention_triton import RowSchedule, attend_rows
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.kernels.rope_write_triton import rope_and_write
from moe_runtime.kernels.router_triton import router_logits
from moe_runtime.kernels.topk_triton import topk
from moe_runtime.layers.cuda_buffers import MAX_DECODE_ROWS, Buffers, Rows, room_of, rows_of
from moe_runtime.layers.cuda_experts import Experts, LocalExperts
from moe_runtime.layers.cuda_layer import CudaLayer, ExpertReader
from moe_runtime.layers.rotary import RotaryTable
from moe_runtime.layers.row_gather import RowGather, open_row_gather
from moe_runtime.layers.row_parallel import Level, adds_shards
from moe_runtime.layers.shard_sum import ShardSum, open_shard_sum
from moe_runtime.models.head_shard import head_shard
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

ExpertsMaker = Callable[[int], Experts]
"""From the most rows of a step to the experts' half of all layers; a collective, CapacityError on all ranks or none."""

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
        max_rows: Most tokens of a step that there is room for.
        max_split_rows: See the function of that name; ``workspace`` is for as many.
        pdl: Launch kernels dependent on the one before; a schedule.
        schedules: Decides the schedule of every launch.
        experts: The experts' half of every layer.
        shard_sum: Adds the group's parts of o_proj.
        row_gather: Moves the group's rows.
        expert_counts: ``[num_moe_layers, num_experts]`` int64, pairs of rows at home here since start.
        tensor_parallel: The ranks that share the attention; ``heads`` are this one's, ``local`` is the model as far as
            its attention goes.

    Args:
        config: Model; every layer a mixture of experts.
        read: Gives tensors; read in the order of the layers.
        dtype: Model dtype.
        max_model_len: Longest context, in tokens.
        max_rows: Most tokens of a step.
        device: Where everything lives.
        schedules: The device's table; by default the one without an audit.
        local_experts: By layer, the logical experts of this process in the order of its physical ones; by default all.
        replicas: By layer, where every logical expert's copies are, on the device; by default physical experts have the
            numbers of logical ones.
        make_experts: Runs them, and gets rows from and to other ranks; by default all are here.
        tensor_parallel: Ranks that share the attention, able to move tensors of the device; by default this one.
        level: Invariance level.
        group: Ranks that make their experts together; by default this one.

    Raises:
        CapacityError: there is no room for ``max_rows``.
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
        local_experts: SequenceOf[SequenceOf[int]] | None = None,
        replicas: SequenceOf[Replicas] | None = None,
        make_experts: ExpertsMaker | None = None,
        tensor_parallel: TensorParallel | None = None,
        level: Level = "topology",
        group: RankGroup | None = None,
    ) -> None:
        check_supported(config)
        self.config = config
        self.tensor_parallel = tp = tensor_parallel or TensorParallel()
        self.heads = head_shard(config, tp.size, tp.rank)
        self.local = replace(
            config, num_attention_heads=self.heads.num_query_heads, num_kv_heads=self.heads.num_kv_heads
        )
        self.adds_shards = adds_shards(tp.size, level)
        self._alone = TensorParallel(group=rehearsal_group(tp.group)) if tp.size > 1 else tp
        self.vocab_bounds = tp.bounds(config.vocab_size)
        self._vocab_ends = torch.tensor(self.vocab_bounds[1:], dtype=torch.int32, device=device)
        self.dtype = dtype
        self.device = device
        # Dependent launch knows nothing of collectives, which may stand between the kernels of a group. Where parts and
        # rows are read in the peers' memory none does; whether it pays there has not been measured.
        self.pdl = device.type == "cuda" and tp.size == 1
        self.schedules = schedules or GpuSchedules(device_kind(device), dtype)
        rotary = RotaryTable(config.rope, config.head_dim, max_model_len)
        self.cos, self.sin = rotary.cos.to(device), rotary.sin.to(device)

        def load(role: str, layer_idx: int = -1) -> torch.Tensor:
            return read(role, layer_idx, None).to(device=device, dtype=dtype).contiguous()

        own_vocab = slice(self.vocab_bounds[tp.rank], self.vocab_bounds[tp.rank + 1])
        self.embedding = load("embed")[own_vocab].contiguous()
        self.lm_head = (
            self.embedding if config.tie_word_embeddings else load("lm_head")[own_vocab].contiguous()
        )
        own_hidden = (
            None if self.adds_shards else slice(*tp.bounds(config.hidden_size)[tp.rank : tp.rank + 2])
        )
        where = device, self.heads, own_hidden
        self.layers = [
            CudaLayer(config, i, load, read, None if local_experts is None else local_experts[i], *where)
            for i in range(config.num_layers)
        ]
        self.replicas: SequenceOf[Replicas | None] = replicas or [None] * config.num_layers
        norms = [layer.input_norm for layer in self.layers[1:]]
        self.next_norms = [*norms, load("final_norm").float()]
        if tp.size > 1:  # the first move connects the ranks, which cannot be captured in a graph
            tp.gather_rows(torch.zeros(1, 1, device=device), [1] * tp.size)
        self._group = group or RankGroup()
        self._make_experts = make_experts or self._all_local
        self.buffers: Buffers
        self.experts: Experts
        self.shard_sum: ShardSum
        self.row_gather: RowGather
        self.max_rows = 0
        self.expert_counts = torch.zeros(
            len(config.moe_layer_ids), config.num_experts, dtype=torch.int64, device=device
        )
        self._make_buffers(max(max_rows, MAX_DECODE_ROWS))
        self.max_split_rows = max_split_rows(self.local, device)
        self.workspace = decode_workspace(
            self.max_split_rows, self.local.num_attention_heads, config.head_dim, max_model_len, device
        )

    def _all_local(self, max_rows: int) -> Experts:
        return LocalExperts(self.config, self.schedules, max_rows, self.dtype, self.device)

    def _make_buffers(self, max_rows: int) -> None:
        if self.max_rows:
            # Their memory makes room for the next ones.
            del self.buffers, self.experts, self.shard_sum, self.row_gather
        self.max_rows = 0
        try:
            # First what is a collective: a rank without room for the rest must not be missed there.
            experts = self._make_experts(max_rows)
            shard_sum, row_gather = all_or_none(
                self._group, lambda: self._open_group(max_rows), failures=(CapacityError, ValueError)
            )
            arguments = self.local, max_rows, self.dtype, self.device
            self.buffers = all_or_none(self._group, lambda: Buffers(*arguments))
            self.experts, self.shard_sum, self.row_gather = experts, shard_sum, row_gather
            self.max_rows = max_rows
            return
        except (CapacityError, torch.OutOfMemoryError) as error:
            message = f"no room for steps of {max_rows} tokens: lower max_num_batched_tokens ({error})"
        raise CapacityError(message)  # out of reach of the error that holds on to what was taken

    def _open_group(self, max_rows: int) -> tuple[ShardSum, RowGather]:
        adding = self.tensor_parallel if self.adds_shards else TensorParallel()  # where no parts are added
        hidden, vocab = self.config.hidden_size, self.config.vocab_size
        sizes = self.config.num_layers, max_rows, MAX_DECODE_ROWS, self.dtype, self.device
        return (
            open_shard_sum(adding, hidden, *sizes),
            open_row_gather(self.tensor_parallel, hidden, vocab, *sizes),
        )

    def reserve_rows(self, max_rows: int, *, exactly: bool = False) -> None:
        """Have room for steps of ``max_rows`` tokens; graphs captured before are of no use then. A collective of ranks,
        whose buffers only grow unless ``exactly``. After a ``CapacityError``, on all of them, the room is as before.
        """
        max_rows, former = max(max_rows, MAX_DECODE_ROWS), self.max_rows
        if former == max_rows or (former > max_rows and self._group.size > 1 and not exactly):
            return
        try:
            self._make_buffers(max_rows)
            return
        except CapacityError as error:
            message = str(error)
        if former:
            self._make_buffers(former)
        raise CapacityError(message)

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
        keys_first: bool = False,
        rehearse: bool = False,
    ) -> None:
        """One row per sequence, or consecutive ones of some, to logits; can be captured in a graph.

        Args:
            token_ids: ``[M]`` int32, -1 in inert rows.
            positions: ``[M]`` int32, -1 in inert rows.
            block_table: ``[M, max_blocks]`` int32.
            num_tokens: ``[1]`` int32 on the device; rows from there on are inert.
            kv_caches: Per layer.
            attention: Schedule of attention.
            logits: ``[M, vocab]`` float32, written; inert rows hold anything.
            keys_first: Write all rows' keys and values before any row attends: a must where a sequence has several
                rows. The attention kernel then writes the same bits once more.
            rehearse: No step of anybody: other ranks do not take part.
        """
        config, eps, m = self.config, self.config.rms_norm_eps, token_ids.shape[0]
        b = self.buffers.rows(m)
        pdl, table = self.pdl, self.schedules
        hidden, query = config.hidden_size, b.attention.shape[1]
        o_proj = table.dense_parts(m, hidden, query, PARTS["row"])
        tp = self._alone if rehearse else self.tensor_parallel
        shape = StepShape.of_bucket(-(-m // tp.size), self.experts.num_processes)
        experts = self.experts.rehearsal(shape.capacity) if rehearse else self.experts
        sums = self.shard_sum.rehearsal() if rehearse else self.shard_sum
        rows = self.row_gather.rehearsal() if rehearse else self.row_gather
        experts.begin_step(pdl=False)
        sums.begin_step()
        rows.begin_step()
        slot_mapping = slots_of(positions, block_table) if keys_first else None
        self._embed(token_ids, b, tp, rows)
        num_home = self.tensor_parallel.num_home(num_tokens)
        for layer, next_norm, (k_cache, v_cache) in zip(self.layers, self.next_norms, kv_caches, strict=True):
            self._gemm(b.normed, layer.qkv, b.qkv, bias=layer.qkv_bias)
            if slot_mapping is not None:
                rope_and_write(
                    b.qkv, positions, slot_mapping, layer.q_norm, layer.k_norm, eps, self.cos, self.sin,
                    k_cache, v_cache, b.q.view(m, self.heads.num_query_heads, config.head_dim),
                    schedule=table.rope(), pdl=pdl,
                )  # fmt: skip
            attend_decode(
                b.qkv, k_cache, v_cache, positions, block_table, layer.q_norm, layer.k_norm, eps,
                self.cos, self.sin, b.attention,
                window=layer.window, workspace=self.workspace, schedule=attention, pdl=pdl,
            )  # fmt: skip
            if tp.size > 1:
                branch, bias = self._row_parallel(b, layer, tp, sums)[:, None], layer.o_bias
            else:
                dense_gemm_parts(b.attention, layer.o_proj, b.parts, schedule=o_proj, pdl=pdl)
                branch, bias = b.parts, layer.o_bias
            self._experts(layer, next_norm, b, branch, bias, shape, num_home, experts, rows)
        sums.end_step(pdl=pdl)
        self._logits(b.normed, logits, rows)
        rows.end_step(pdl=pdl)
        self._count(shape, experts)

    def mixed(self, step: MixedInput, kv_caches: KVCaches, *, rehearse: bool = False) -> torch.Tensor:
        """Any rows, to hidden states ``[T, hidden]`` after the final norm (a view of a buffer); can be captured
        where ``Experts.has_fixed_steps``. ``rehearse`` as for ``decode``; not in a group."""
        config, eps, num_tokens = self.config, self.config.rms_norm_eps, step.token_ids.shape[0]
        b = self.buffers.rows(num_tokens)
        pdl, table = self.pdl, self.schedules
        shape, tp = step.shape, self.tensor_parallel
        experts = self.experts.rehearsal(shape.capacity) if rehearse else self.experts
        experts.begin_step(pdl=False)
        self.shard_sum.begin_step()
        rows = self.row_gather
        rows.begin_step()
        num_home = self.tensor_parallel.num_home(step.num_tokens)
        if num_tokens == 0:
            for layer, next_norm in zip(self.layers, self.next_norms, strict=True):
                experts.run(
                    layer.layer_idx, layer.experts, shape, num_home, b.residual, next_norm, b.normed, pdl=pdl
                )
            return b.normed
        rope = table.rope()
        self._embed(step.token_ids, b, tp, rows)
        q = b.q.view(num_tokens, self.heads.num_query_heads, config.head_dim)
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
            if tp.size > 1:
                branch, bias = self._row_parallel(b, layer, tp, self.shard_sum), layer.o_bias
            else:
                self._gemm(b.attention, layer.o_proj, b.branch, parts=PARTS["row"], bias=layer.o_bias)
                branch, bias = b.branch, None
            self._experts(layer, next_norm, b, branch[:, None], bias, shape, num_home, experts, rows)
        self.shard_sum.end_step(pdl=pdl)
        rows.end_step(pdl=pdl)
        self._count(shape, experts)
        return b.normed

    def waits_for(self) -> tuple[str, int | None]:
        """What the step under way waits for, and for which rank of the world; nothing where there are no flags."""
        own = self.shard_sum.flags, self.row_gather.flags, self.experts.flags
        readers = [flags for flags in own if flags is not None]
        for reader in readers:
            reason, rank = reader.reason()
            if reason:
                return reason, rank
        return "no other rank's flag is missing, so this GPU itself does not go on" if readers else "", None

    def _embed(self, token_ids: torch.Tensor, b: Rows, tp: TensorParallel, rows: RowGather) -> None:
        """The tokens' rows and their first norm; exact copies, whichever rank of the group holds a row."""
        norm, eps = self.layers[0].input_norm, self.config.rms_norm_eps
        if tp.size == 1:
            embed_norm(token_ids, self.embedding, norm, eps, b.residual, b.normed)
            return
        first = self.vocab_bounds[tp.rank]
        own = torch.where(token_ids >= first, token_ids - first, -1).int()
        # Rows held elsewhere are zero.
        embed_norm(own, self.embedding, norm, eps, rows.owned_places(len(own)), b.normed)
        rows.gather_owned(token_ids, self._vocab_ends, b.residual)
        rms_norm(b.residual, norm, eps, b.normed)

    def _row_parallel(self, b: Rows, layer: CudaLayer, tp: TensorParallel, sums: ShardSum) -> torch.Tensor:
        """``[M, hidden]`` of o_proj over the group, rounded; layers/row_parallel.py states the tree."""
        m, hidden = b.attention.shape[0], self.config.hidden_size
        if self.adds_shards:
            part = sums.part(m)
            self._gemm(b.attention, layer.o_proj, part, room=sums.room(part))
            return sums.total(part, pdl=self.pdl)
        whole = tp.gather_columns(b.attention, [b.attention.shape[1]] * tp.size)
        own = torch.empty(m, layer.o_proj.shape[0], dtype=self.dtype, device=self.device)
        self._gemm(whole, layer.o_proj, own, parts=PARTS["row"])
        return tp.gather_columns(own, tp.widths(hidden))

    def _experts(
        self,
        layer: CudaLayer,
        next_norm: torch.Tensor,
        b: Rows,
        branch: torch.Tensor,
        bias: torch.Tensor | None,
        shape: StepShape,
        num_tokens: torch.Tensor,
        experts: Experts,
        rows: RowGather,
    ) -> None:
        """From the attention's branch ``[M, P, hidden]`` to the next layer's normed rows."""
        config, eps, pdl, table = self.config, self.config.rms_norm_eps, self.pdl, self.schedules
        tp, routed, residual, normed = self.tensor_parallel, experts.routed_rows(shape), b.residual, b.normed
        num_home = routed.x.shape[0]  # in a graph one more than are at home here where M has a remainder
        if tp.size > 1:
            residual, normed = (places[:num_home] for places in rows.home_places(b.residual.shape[0]))
        own = slice(len(range(tp.rank, b.residual.shape[0], tp.size)))
        merge_residual_norm(
            branch, b.residual, layer.post_attention_norm, eps, residual[own], routed.x[own],
            bias=bias, share=(tp.rank, tp.size), pdl=pdl,
        )  # fmt: skip
        logits = b.router_logits[:num_home]
        router_logits(
            routed.x, layer.router, logits, schedule=table.router(num_home, config.hidden_size), pdl=pdl
        )
        topk(
            logits, num_tokens, config.num_experts_per_tok, config.norm_topk_prob,
            routed.ids, routed.weights, routed.slot_table,
            routing=self.buffers.routing[layer.layer_idx, :num_home], replicas=self.replicas[layer.layer_idx],
            schedule=table.topk(num_home), pdl=pdl,
        )  # fmt: skip
        experts.run(layer.layer_idx, layer.experts, shape, num_tokens, residual, next_norm, normed, pdl=pdl)
        if tp.size > 1:
            rows.gather_home(b.residual, b.normed, pdl=pdl)

    def _count(self, shape: StepShape, experts: Experts) -> None:
        """Add the step's pairs to the load; inert rows count nothing."""
        num_home = experts.routed_rows(shape).x.shape[0]
        count_experts(self.buffers.routing[:, :num_home], self.expert_counts, pdl=self.pdl)

    def _gemm(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        out: torch.Tensor,
        *,
        parts: int = 1,
        bias: torch.Tensor | None = None,
        room: int | None = None,
    ) -> None:
        """``dense_gemm``; without a bias the vendor's, at the next row count that an audit allows, on rows of the same
        buffers; ``room`` is that of ``out`` where its storage has others behind it."""
        m, (n, k) = x.shape[0], w.shape
        if bias is None:
            vendor = self.schedules.vendor(
                m, n, k, parts, float32_out=out.dtype == torch.float32,
                max_rows=min(room_of(x), room_of(out) if room is None else room),
            )  # fmt: skip
            if vendor is not None:
                vendor_gemm(rows_of(x, vendor.rows), w, rows_of(out, vendor.rows), parts=parts)
                return
        schedule = self.schedules.dense(m, n, k, parts)
        dense_gemm(x, w, out, parts=parts, bias=bias, schedule=schedule, pdl=self.pdl)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]`` float32 from ``[rows, hidden]``, on every rank of the group."""
        out = torch.empty(hidden.shape[0], self.config.vocab_size, dtype=torch.float32, device=self.device)
        self.row_gather.begin_step()
        self._logits(hidden.contiguous(), out, self.row_gather)
        self.row_gather.end_step(pdl=self.pdl)
        return out

    def _logits(self, normed: torch.Tensor, logits: torch.Tensor, rows: RowGather) -> None:
        """Write ``[rows, vocab]``; the group's ranks have a share of the vocabulary each."""
        if self.tensor_parallel.size == 1:
            self._gemm(normed, self.lm_head, logits)
            return
        own, room = rows.column_places(normed.shape[0])
        self._gemm(normed, self.lm_head, own, room=room)
        rows.gather_columns(own, logits, pdl=self.pdl)
