"""A stand-in for deep_ep on CPU ranks, made from what is known of its interface and arithmetic.

``ElasticBuffer`` (V2): expanded dispatch, one row per (token, slot), expert after expert, in an order of arrival that
changes from call to call; the sum at home over valid slots ascending, fp32 from zero, with the bf16 addition that
DeepEP has for two terms; with ``allow_multiple_reduction`` a bf16 partial row per rank first, added by first occurrence
among the slots. ``Buffer`` (V1): the low-latency calls, with the weights applied at home in fp32.

Ids are in blocks of the same length on each rank. Everything travels through ``RankGroup.all_gather``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.comm.groups import RankGroup

__all__ = ["Buffer", "DescendingBuffer", "ElasticBuffer", "PairwiseBuffer", "topk_idx_t"]

topk_idx_t = torch.int64
_calls = itertools.count()


@dataclass(frozen=True)
class Handle:
    """Of a dispatch: rows per expert, where each row came from, and the ids of the rank's own tokens."""

    psum_num_recv_tokens_per_expert: torch.Tensor
    source: list[tuple[int, int, int]]  # rank, token, slot
    topk_idx: torch.Tensor


class _Ranks:
    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        joined = dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        self.group = RankGroup(rank=rank, size=size, process_group=process_group)

    def gather(self, x: torch.Tensor, most: int) -> torch.Tensor:
        """``[W, most, ...]``, unused room filled with what must not be read."""
        room = torch.full((most, *x.shape[1:]), -7, dtype=x.dtype)
        room[: len(x)] = x
        return self.group.all_gather(room.view(torch.uint8)).view(x.dtype)

    def receive(
        self, x: torch.Tensor, ids: torch.Tensor, most: int, num_experts: int
    ) -> tuple[list[torch.Tensor], list[list[tuple[int, int, int]]], torch.Tensor]:
        """Rows and their sources per local expert, in order of arrival; ids of all."""
        rank, size = self.group.rank, self.group.size
        assert num_experts % size == 0
        length = num_experts // size
        assert len(x) <= most
        assert bool(((ids >= -1) & (ids < num_experts)).all())
        all_x, all_ids = self.gather(x, most), self.gather(ids, most)
        rows, sources = [], []
        generator = torch.Generator().manual_seed(next(_calls))
        for expert in range(rank * length, (rank + 1) * length):
            found = torch.nonzero(all_ids == expert)
            found = found[torch.randperm(len(found), generator=generator)]
            rows.append(all_x[found[:, 0], found[:, 1]])
            sources.append([tuple(place) for place in found.tolist()])
        return rows, sources, all_ids

    def bring_home(
        self, rows: torch.Tensor, source: list[tuple[int, int, int]], most: int, num_topk: int
    ) -> torch.Tensor:
        """``[W, most, K, H]``: what each rank sends to this one, NaN where it sends nothing."""
        sent = rows.new_full((self.group.size, most, num_topk, rows.shape[1]), torch.nan)
        for row, place in zip(rows, source, strict=True):
            sent[place] = row
        return self.group.all_gather(sent.view(torch.uint8)).view(rows.dtype)[:, self.group.rank]


class ElasticBuffer:
    """V2's, and V2.5's under another name."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> None:
        assert not allow_hybrid_mode, "one host, one level"
        self.ranks = _Ranks(group)
        self.most = num_max_tokens_per_rank
        self.hidden = hidden
        self.allow_multiple_reduction = allow_multiple_reduction
        self.spare_rows = 0

    def dispatch(
        self,
        x: torch.Tensor,
        *,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        expert_alignment: int,
        do_expand: bool,
        do_cpu_sync: bool,
    ) -> tuple[torch.Tensor, None, torch.Tensor, Handle, None]:
        """Expanded form only."""
        assert x.dtype == torch.bfloat16
        assert topk_idx.dtype == topk_idx_t
        assert topk_weights.dtype == torch.float32
        assert (num_max_tokens_per_rank, x.shape[1]) == (self.most, self.hidden)
        assert (expert_alignment, do_expand, do_cpu_sync) == (1, True, True)
        rows, sources, _ = self.ranks.receive(x, topk_idx, self.most, num_experts)
        all_weights = self.ranks.gather(topk_weights, self.most)
        source = [place for places in sources for place in places]
        weights = torch.stack([all_weights[place] for place in source]) if source else torch.empty(0)
        psum = torch.tensor([len(places) for places in sources]).cumsum(0).int()
        spare = x.new_full((self.spare_rows, x.shape[1]), torch.nan)
        spare_weights = torch.full((self.spare_rows,), torch.nan)
        return (
            torch.cat([*rows, spare]),
            None,
            torch.cat([weights, spare_weights]),
            Handle(psum, source, topk_idx),
            None,
        )

    def combine(
        self, x: torch.Tensor, *, handle: Handle, topk_weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None]:
        """The sum at home."""
        assert x.dtype == torch.bfloat16
        assert topk_weights is None, "rows are weighted already"
        assert len(x) == len(handle.source) + self.spare_rows
        ids = handle.topk_idx
        num_topk = ids.shape[1]
        home = self.ranks.bring_home(x[: len(handle.source)], handle.source, self.most, num_topk)
        sums = [
            self._reduce(self._terms(home[:, token], ids[token]), x.shape[1]) for token in range(len(ids))
        ]
        out = torch.stack(sums) if sums else x.new_empty(0, x.shape[1])
        return out, None, None

    def _terms(self, of_rank: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
        """Rows to add: of each valid slot, or of each rank by first occurrence. ``of_rank`` is ``[W, K, H]``."""
        sender = (~of_rank.isnan().all(-1)).int().argmax(0)
        slots = [slot for slot in range(len(ids)) if ids[slot] >= 0]
        if not self.allow_multiple_reduction:
            return [of_rank[sender[slot], slot] for slot in slots]
        terms = []
        for rank in dict.fromkeys(int(sender[slot]) for slot in slots):
            own = [of_rank[rank, slot] for slot in slots if sender[slot] == rank]
            terms.append(self._reduce(own, of_rank.shape[-1]))
        return terms

    def _reduce(self, terms: list[torch.Tensor], hidden: int) -> torch.Tensor:
        if len(terms) == 2:
            return terms[0] + terms[1]
        total = torch.zeros(hidden)
        for term in terms:
            total = total + term.float()
        return total.to(torch.bfloat16)


class DescendingBuffer(ElasticBuffer):
    """Wrong: slots in descending order."""

    def _reduce(self, terms: list[torch.Tensor], hidden: int) -> torch.Tensor:
        return super()._reduce(terms[::-1], hidden)


class PairwiseBuffer(ElasticBuffer):
    """Wrong: neighbours are added first, in fp32."""

    def _reduce(self, terms: list[torch.Tensor], hidden: int) -> torch.Tensor:
        fp32 = [term.float() for term in terms] or [torch.zeros(hidden)]
        while len(fp32) > 1:
            fp32 = [sum(fp32[i : i + 2], torch.zeros(hidden)) for i in range(0, len(fp32), 2)]
        return fp32[0].to(torch.bfloat16)


class Buffer:
    """V1's, opened for low latency."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.ranks = _Ranks(group)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        max_tokens: int,
        num_experts: int,
        use_fp8: bool = True,
    ) -> tuple[Any, torch.Tensor, Any, None, None]:
        """``[L, W * max_tokens, H]``, of which an expert's first rows count."""
        rows, sources, _ = self.ranks.receive(x, topk_idx, max_tokens, num_experts)
        recv = x.new_full((len(rows), self.ranks.group.size * max_tokens, x.shape[1]), torch.nan)
        for room, of_expert in zip(recv, rows, strict=True):
            room[: len(of_expert)] = of_expert
        counts = torch.tensor([len(places) for places in sources], dtype=torch.int32)
        packed: Any = (recv.to(torch.float8_e4m3fn), None) if use_fp8 else recv
        return packed, counts, (sources, max_tokens), None, None

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any
    ) -> tuple[torch.Tensor, None, None]:
        """Home loops over the slots, fp32, weight times row."""
        sources, most = handle
        rows = torch.cat([room[: len(places)] for room, places in zip(x, sources, strict=True)])
        source = [place for places in sources for place in places]
        home = self.ranks.bring_home(rows, source, most, topk_idx.shape[1])
        out = torch.zeros(len(topk_idx), x.shape[2])
        for token, slot in torch.nonzero(topk_idx >= 0).tolist():
            sender = int((~home[:, token, slot].isnan().all(-1)).int().argmax())
            product = topk_weights[token, slot].double() * home[sender, token, slot].double()
            out[token] = (product + out[token].double()).float()
        return out.to(torch.bfloat16), None, None
