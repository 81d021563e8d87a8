"""One rank's layers of a prefill micro-batch, part by part, by the engine's kernels and buffers.

Symbols: W ranks, C tokens of each rank, K slots, H hidden.

``parts`` of overlap_plans.py are methods here. What travels goes by one of three ways, ``MicroBatch.programs``: None,
the engine's dispatch and a program for every few rows home; a number, looping programs (overlap_kernels.py); 0, the
copy engines, which take no multiprocessor: a rank's rows whole, and home all K rows of every token, whether they are
computed here or not, into places by source rank.

The experts' GEMMs have one program for each multiprocessor, with a fixed share of the tiles, and the second fills its
registers: nothing runs beside it, not even the one warp of a wait, and a program that finds no place begins when others
end. ``MicroBatch.spare`` takes so many programs away, which leaves as many multiprocessors to the exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from overlap_kernels import send_expert_rows, send_table_rows
from overlap_plans import Entry

from moe_runtime.comm.gpu_exchange import MAX_SLICE, ExchangeSizes, StepShape, SymmetricExchange
from moe_runtime.comm.symmetric_memory import SymmetricSpace, carved_bytes
from moe_runtime.kernels import grouped_experts_triton
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.kernels.attention_tiles import make_row_tiles
from moe_runtime.kernels.dispatch_triton import RowHomes, TableSlice
from moe_runtime.kernels.gemm import PARTS
from moe_runtime.kernels.gemm_triton import dense_gemm
from moe_runtime.kernels.gpu_schedules import GpuSchedules, device_kind
from moe_runtime.kernels.grouped_experts_triton import GroupedSchedule
from moe_runtime.kernels.norm_triton import RowSources, combine_residual_norm, merge_residual_norm, rms_norm
from moe_runtime.kernels.peer_flags_triton import peer_barrier
from moe_runtime.kernels.prefill_attention_triton import attend_rows
from moe_runtime.kernels.rope_write_triton import rope_and_write
from moe_runtime.kernels.router_triton import router_logits
from moe_runtime.kernels.topk_triton import topk
from moe_runtime.layers.cuda_buffers import Buffers
from moe_runtime.layers.cuda_experts import ExpertScratch
from moe_runtime.layers.cuda_layer import CudaLayer, ExpertReader
from moe_runtime.layers.rotary import RotaryTable
from moe_runtime.models.head_shard import head_shard
from moe_runtime.models.model_config import ModelConfig

__all__ = ["LayerStack", "MicroBatch", "run_in_turn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStack:
    """Layers with random weights, the same on every rank but for the experts, of which a rank has its share.

    Attributes:
        config: Of as many layers as there are weights.
        layers: Weights.
        first_expert: ``W + 1`` exclusive prefix sums of experts per rank.
        schedules: The device's.
        dtype, device: Of the weights.
        read: Gives any of the weights, also those of other ranks.
    """

    config: ModelConfig
    layers: Sequence[CudaLayer]
    first_expert: tuple[int, ...]
    schedules: GpuSchedules
    dtype: torch.dtype
    device: torch.device
    read: ExpertReader

    @classmethod
    def draw(
        cls, config: ModelConfig, num_layers: int, rank: int, size: int, device: torch.device
    ) -> LayerStack:
        """Normal weights that keep a row's size; norms of one."""
        config = replace(
            config,
            num_layers=num_layers,
            moe_layer_ids=tuple(range(num_layers)),
            sliding_windows=(None,) * num_layers,
        )
        dtype, hidden, width = torch.bfloat16, config.hidden_size, config.moe_intermediate_size
        query, key = config.num_attention_heads * config.head_dim, config.num_kv_heads * config.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "q_proj": (query, hidden),
            "k_proj": (key, hidden),
            "v_proj": (key, hidden),
            "o_proj": (hidden, query),
            "router": (config.num_experts, hidden),
            "gate_proj": (width, hidden),
            "up_proj": (width, hidden),
            "down_proj": (hidden, width),
        }
        ones = {"q_norm": config.head_dim, "k_norm": config.head_dim}

        def read(role: str, layer_idx: int, expert: int | None = None) -> torch.Tensor:
            if role.endswith("norm"):
                return torch.ones(ones.get(role, hidden), dtype=dtype, device=device)
            seed = sorted(shapes).index(role) + 16 * (
                layer_idx + 1024 * (0 if expert is None else expert + 1)
            )
            generator = torch.Generator(device).manual_seed(seed)
            weights = torch.randn(shapes[role], generator=generator, device=device)
            return weights.mul_(shapes[role][1] ** -0.5).to(dtype)

        first_expert = tuple(config.num_experts * r // size for r in range(size + 1))
        local, heads = range(first_expert[rank], first_expert[rank + 1]), head_shard(config, 1, 0)
        return cls(
            config=config,
            layers=[CudaLayer(config, i, read, read, local, device, heads, None) for i in range(num_layers)],
            first_expert=first_expert,
            schedules=GpuSchedules(device_kind(device), dtype),
            dtype=dtype,
            device=device,
            read=read,
        )


class MicroBatch:
    """Some sequences' first tokens on one rank, and their buffers.

    Args:
        stack: Weights, taken by turns.
        space: With ``region_bytes`` of room.
        sizes: From ``sizes_of``.
        num_seqs, seq_len: C is their product; of every rank.
        seed: Of the rows, another one for every rank.
        waits: Ranks are processes that wait for each other.

    Attributes:
        programs, spare: See the module; no bit depends on them.
        num_tokens: C.
    """

    def __init__(
        self,
        stack: LayerStack,
        space: SymmetricSpace,
        sizes: ExchangeSizes,
        num_seqs: int,
        seq_len: int,
        seed: int,
        *,
        waits: bool = True,
    ) -> None:
        config, device = stack.config, stack.device
        self.stack, self.space, self.num_tokens = stack, space, num_seqs * seq_len
        if sizes.size * self.num_tokens > MAX_SLICE:
            raise ValueError(
                f"{sizes.size} ranks of {self.num_tokens} tokens must fit one slice ({MAX_SLICE})"
            )
        self.programs: int | None = None
        self.spare = 0
        self.exchange = SymmetricExchange(space, sizes, stack.first_expert, waits=waits)
        self.arrived = space.carve("arrived", *_arrived(sizes))
        self.shape = StepShape.of_bucket(self.num_tokens, sizes.size)
        self.buffers = Buffers(config, self.num_tokens, stack.dtype, device)
        self._whole = TableSlice(num_tokens=self.num_tokens, capacity=self.num_tokens)
        positions = sizes.size * self.num_tokens
        self._scratch = ExpertScratch(config, stack.schedules, positions, stack.dtype, device)
        self._staged = torch.zeros(self.arrived.local.shape, dtype=stack.dtype, device=device)
        generator = torch.Generator(device).manual_seed(seed)
        residual = torch.randn(self.num_tokens, config.hidden_size, generator=generator, device=device)
        self._residual = residual.to(stack.dtype)
        self._normed = torch.empty_like(self._residual)
        rms_norm(self._residual, stack.layers[0].input_norm, config.rms_norm_eps, self._normed)
        self._count = torch.full((1,), self.num_tokens, dtype=torch.int32, device=device)
        self._place_keys(num_seqs, seq_len)

    @staticmethod
    def sizes_of(config: ModelConfig, size: int, num_tokens: int, num_layers: int) -> ExchangeSizes:
        """Of the exchange's buffers for steps of ``num_layers`` layers."""
        return ExchangeSizes(
            size=size, max_rows=num_tokens, hidden=config.hidden_size, num_topk=config.num_experts_per_tok,
            num_layers=num_layers, dtype=torch.bfloat16,
        )  # fmt: skip

    @staticmethod
    def region_bytes(sizes: ExchangeSizes) -> int:
        """Bytes of symmetric memory: the exchange's, and rows by source rank for copies."""
        return sizes.symmetric_bytes + carved_bytes(*_arrived(sizes))

    def begin(self, plan: Sequence[Entry], batch: int) -> None:
        """Before the first layer of a step: the same rows as ever, if the plan computes with this micro-batch's."""
        self.exchange.begin_step(pdl=False)
        if any(entry.batch == batch and entry.part == "attend" for entry in plan):
            self.buffers.residual.copy_(self._residual)
            self.buffers.normed.copy_(self._normed)

    def run(self, entry: Entry, *, pdl: bool) -> None:
        """Launch a part of a layer."""
        getattr(self, entry.part)(entry.layer, pdl)

    def attend(self, layer: int, pdl: bool) -> None:
        """As ``CudaDecoder.mixed`` has it, up to the routing."""
        weights, config, table = self._layer(layer), self.stack.config, self.stack.schedules
        b, eps, m = self.buffers.rows(self.num_tokens), self.stack.config.rms_norm_eps, self.num_tokens
        k_cache, v_cache = self._caches[layer % len(self._caches)]
        q = b.q.view(m, config.num_attention_heads, config.head_dim)
        qkv = table.dense(m, weights.qkv.shape[0], config.hidden_size)
        dense_gemm(b.normed, weights.qkv, b.qkv, schedule=qkv, pdl=pdl)
        rope_and_write(
            b.qkv, self._positions, self._slots, weights.q_norm, weights.k_norm, eps, self._cos, self._sin,
            k_cache, v_cache, q, schedule=table.rope(), pdl=pdl,
        )  # fmt: skip
        attend_rows(
            q, k_cache, v_cache, self._tiles, self._block_table, b.attention,
            schedule=self._row_schedule, pdl=pdl,
        )  # fmt: skip
        parts = PARTS["row"]
        o_proj = table.dense(m, config.hidden_size, weights.o_proj.shape[1], parts)
        dense_gemm(b.attention, weights.o_proj, b.branch, parts=parts, schedule=o_proj, pdl=pdl)
        x, ids, shares = self.exchange.own_rows(self.shape)
        merge_residual_norm(
            b.branch[:, None], b.residual, weights.post_attention_norm, eps, b.residual, x, pdl=pdl
        )
        router = table.router(m, config.hidden_size)
        router_logits(x, weights.router, b.router_logits, schedule=router, pdl=pdl)
        topk(
            b.router_logits, self._count, config.num_experts_per_tok, config.norm_topk_prob, ids, shares, None,
            routing=self.buffers.routing[layer % len(self.stack.layers), :m], schedule=table.topk(m), pdl=pdl,
        )  # fmt: skip

    def dispatch(self, layer: int, pdl: bool) -> None:
        """Rows and routing to the peers' tables."""
        if self.programs is None:
            self.exchange.dispatch(self.shape, self._count, pdl=pdl)
        elif self.programs:
            x, ids, shares = self.exchange.own_rows(self.shape)
            table, first_expert = self.exchange.table(self.shape), self.exchange.first_expert
            send_table_rows(x, ids, shares, table, first_expert, self.programs)
        else:
            own = slice(self.exchange.rank * self.num_tokens, (self.exchange.rank + 1) * self.num_tokens)
            for name in ("x", "ids", "weights"):
                buffer = self.space.buffers[name]
                for peer in self._peers():
                    buffer.copies[peer][own].copy_(buffer.local[own])

    def await_table(self, layer: int, pdl: bool) -> None:
        """The layer's first flag."""
        self._await(2 * layer, pdl)

    def experts_home(self, layer: int, pdl: bool) -> None:
        """As ``SpreadExperts`` has it."""
        self._experts(layer, *self.exchange.targets(self.shape, self._whole), pdl)

    def experts_local(self, layer: int, pdl: bool) -> None:
        """The same; rows for peers stay here."""
        rows = self.arrived.local[self.exchange.rank] if self.programs == 0 else self.home_rows()
        self._experts(layer, rows, self._homes_here[self.programs == 0], pdl)

    def send(self, layer: int, pdl: bool) -> None:
        """Those rows to their homes."""
        exchange, rank = self.exchange, self.exchange.rank
        if self.programs == 0:
            for peer in self._peers():
                self.arrived.copies[peer][rank].copy_(self._staged[peer])
            return
        first, end = self.stack.first_expert[rank : rank + 2]
        _, homes = exchange.targets(self.shape, self._whole)
        send_expert_rows(
            self._staged,
            exchange.table(self.shape),
            self.home_rows(),
            homes.offsets,
            (first, end),
            self.programs,
        )

    def await_homes(self, layer: int, pdl: bool) -> None:
        """The layer's second flag."""
        self._await(2 * layer + 1, pdl)

    def combine(self, layer: int, pdl: bool) -> None:
        """The sum, residual and norm, of rows that are home."""
        self._combine(layer, pdl)

    def combine_waiting(self, layer: int, pdl: bool) -> None:
        """The same, behind the second flag."""
        self._combine(layer, pdl, flags=self.exchange.flags, channel=2 * layer + 1)

    def home_rows(self) -> torch.Tensor:
        """``[C, K, H]`` where expert rows come home, unless copies bring them. After ``compute`` alone, which fills the
        own experts' slots only, others hold what some layer before has left there."""
        return self.exchange.collect(self.shape)[0]

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Copies of what a step leaves."""
        return self.buffers.residual.clone(), self.buffers.normed.clone()

    def received(self) -> tuple[torch.Tensor, ...]:
        """Copies of what peers have sent: routing, rows of tokens with an expert here, expert rows."""
        table = self.exchange.table(self.shape)
        here = self._held(table.ids).any(1)
        x = torch.where(here[:, None], table.x, 0)
        _, ids, _ = self.exchange.own_rows(self.shape)
        rows = self.home_rows().clone()
        if self.programs == 0:
            for peer, arrived in enumerate(self.arrived.local):
                first, end = self.stack.first_expert[peer : peer + 2]
                rows = torch.where(((ids >= first) & (ids < end))[..., None], arrived, rows)
        return table.ids.clone(), table.weights.clone(), x, rows

    def poison(self) -> None:
        """Nothing has come, and there are no outputs: a check would see it."""
        table, rank = self.exchange.table(self.shape), self.exchange.rank
        for peer in self._peers():
            theirs = slice(peer * self.num_tokens, (peer + 1) * self.num_tokens)
            table.x[theirs] = float("nan")
            table.ids[theirs] = -1
            table.weights[theirs] = float("nan")
            self.arrived.local[peer].fill_(float("nan"))
        _, ids, _ = self.exchange.own_rows(self.shape)
        first, end = self.stack.first_expert[rank : rank + 2]
        own = (ids >= first) & (ids < end)
        self.home_rows()[~own] = float("nan")
        self.poison_outputs()

    def poison_outputs(self) -> None:
        """Outputs that no step leaves."""
        self.buffers.residual.fill_(float("nan"))
        self.buffers.normed.fill_(float("nan"))

    def bytes_out(self) -> int:
        """That leave this rank in an exchange of the rows that are there, on the way of ``programs``."""
        _, ids, _ = self.exchange.own_rows(self.shape)
        row_bytes = self.stack.config.hidden_size * self.stack.dtype.itemsize
        num_bytes = len(self._peers()) * ids.numel() * 8
        first = self.stack.first_expert
        table_ids = self.exchange.table(self.shape).ids.view(-1, self.num_tokens, ids.shape[1])
        for peer in self._peers():
            if self.programs == 0:
                num_bytes += (self.num_tokens + ids.numel()) * row_bytes
                continue
            sent = ((ids >= first[peer]) & (ids < first[peer + 1])).any(1)
            num_bytes += int(sent.sum() + self._held(table_ids[peer]).sum()) * row_bytes
        return num_bytes

    def share(self) -> float:
        """Of all ranks' pairs, those of this rank's experts, as a multiple of an even share."""
        held = self._held(self.exchange.table(self.shape).ids)
        return float(held.float().mean()) * self.exchange.size

    def _layer(self, layer: int) -> CudaLayer:
        return self.stack.layers[layer % len(self.stack.layers)]

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.exchange.size) if peer != self.exchange.rank]

    def _held(self, ids: torch.Tensor) -> torch.Tensor:
        first, end = self.stack.first_expert[self.exchange.rank : self.exchange.rank + 2]
        return (ids >= first) & (ids < end)

    def _await(self, channel: int, pdl: bool) -> None:
        if self.exchange.flags is not None:
            peer_barrier(self.exchange.flags, channel, pdl=pdl)

    def _experts(self, layer: int, rows: torch.Tensor, homes: RowHomes, pdl: bool) -> None:
        table, piece, usual = (
            self.exchange.table(self.shape),
            self._whole,
            grouped_experts_triton._num_programs,
        )

        def num_programs(x: torch.Tensor, schedule: GroupedSchedule) -> int:
            return max(1, usual(x, schedule) - self.spare * schedule.programs_per_sm)

        with mock.patch.object(grouped_experts_triton, "_num_programs", num_programs):
            self._scratch.grouped(
                self._layer(layer).experts, table.x, piece.of(table.ids), piece.of(table.weights), rows, homes,
                self._scratch.gathered(table.ids.numel()), self.stack.first_expert[self.exchange.rank], pdl,
                source=piece,
            )  # fmt: skip

    def _combine(self, layer: int, pdl: bool, **waiting: Any) -> None:
        rows, sources = self.exchange.collect(self.shape)
        if self.programs == 0:
            _, ids, _ = self.exchange.own_rows(self.shape)
            rows, sources = (
                self.arrived.local.flatten(0, 1),
                RowSources(ids=ids, first_expert=self.exchange.first_expert),
            )
        b, norm = self.buffers.rows(self.num_tokens), self._layer(layer + 1).input_norm
        combine_residual_norm(
            rows, b.residual, norm, self.stack.config.rms_norm_eps, b.residual, b.normed,
            sources=sources, pdl=pdl, **waiting,
        )  # fmt: skip

    def _place_keys(self, num_seqs: int, seq_len: int) -> None:
        """Caches, where tokens stand in them, tiles, and where rows for peers stay."""
        config, device, dtype = self.stack.config, self.stack.device, self.stack.dtype
        per_seq = -(-seq_len // BLOCK_SIZE)
        shape = (num_seqs * per_seq, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self._caches = [
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for _ in self.stack.layers
        ]
        blocks = torch.arange(num_seqs * per_seq, dtype=torch.int32, device=device)
        self._block_table = blocks.view(num_seqs, per_seq)
        within = torch.arange(seq_len, device=device)
        starts = torch.arange(num_seqs, device=device)[:, None] * (per_seq * BLOCK_SIZE)
        self._slots = (starts + within).flatten()
        self._positions = within.repeat(num_seqs).int()
        rotary = RotaryTable(config.rope, config.head_dim, seq_len)
        self._cos, self._sin = rotary.cos.to(device), rotary.sin.to(device)
        self._row_schedule = self.stack.schedules.attention_rows(few=False)
        tiles = make_row_tiles(
            [seq_len] * num_seqs, [0] * num_seqs,
            num_groups=config.num_query_heads_per_kv_head, block_rows=self._row_schedule.block_rows,
        )  # fmt: skip
        self._tiles = torch.from_numpy(tiles).to(device)
        self._homes_here = {
            False: self._homes_from(self.home_rows()),
            True: self._homes_from(self.arrived.local[self.exchange.rank]),
        }

    def _homes_from(self, own: torch.Tensor) -> RowHomes:
        """Own rows to ``own``, those of peers to their blocks of ``_staged``."""
        distances = [(block.data_ptr() - own.data_ptr()) // own.element_size() for block in self._staged]
        distances[self.exchange.rank] = 0
        assert all(distance % 16 == 0 for distance in distances), f"blocks are not aligned: {distances}"
        return RowHomes(
            offsets=torch.tensor(distances, dtype=torch.int64, device=own.device), slice=self._whole
        )


def run_in_turn(plan: Sequence[Entry], ranks: Sequence[Sequence[MicroBatch]]) -> None:
    """A plan in the order of its list, every entry on all virtual ranks before the next one.

    Args:
        plan: Entries.
        ranks: The micro-batches of each rank.
    """
    for batches in ranks:
        for i, batch in enumerate(batches):
            batch.begin(plan, i)
    for entry in plan:
        for batches in ranks:
            batches[entry.batch].run(entry, pdl=False)


def _arrived(sizes: ExchangeSizes) -> tuple[tuple[int, ...], torch.dtype]:
    return (sizes.size, sizes.max_rows, sizes.num_topk, sizes.hidden), sizes.dtype
