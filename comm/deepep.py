"""Dispatchers over DeepEP: ``DeepEPDispatcher`` for V2's expanded exchange, ``LowLatencyDispatcher`` for V1's calls.

The only file that imports deep_ep, and only where one of its buffers is opened. DeepEP moves rows between GPUs; CPU
ranks cannot use it. Rows are bfloat16. comm/deepep_layout.py maps arguments and results.

Numerics, V2: with ``do_expand=True`` and ``allow_multiple_reduction=False`` every (token, slot) row comes home
unreduced, and DeepEP adds a token's valid slots in one fp32 pass over ascending slots with one rounding (read in
DeepEP's source, V2.1 and V2.5): the tree of kernels/combine.py, so its sum is our sum. Rows are weighted where the
expert is; DeepEP is given no weights on the way back, which it asserts. A shared expert's row would be the bias, which
DeepEP adds first. With ``allow_multiple_reduction=True`` (comm/multiple_reduction.py, level ``batch``) a rank adds its
slots, rounds, and the home rank adds the partial rows by first occurrence among the slots; the slots are handed over
rank by rank, so that partial rows add in ascending rank order. ``allow_hybrid_mode`` is off, for that tree's sake.

Numerics, V1 low latency: DeepEP's dispatch carries no routing weights and its combine multiplies by them in fp32
without a rounding of the product, which the tree has. So each (token, slot) travels as a token of one slot with a
weight of one, comes back as it is, is weighted at the home rank and added by kernels/combine.py: DeepEP adds nothing.
No more bytes travel for it, since these calls send a token once per slot anyhow; the receive buffer has K times the
room.

Order of arrival is not fixed by DeepEP. No bit depends on it, because an expert's row depends on its own input alone.
``open_deepep`` proves the sum on hostile data before the first request (comm/sum_check.py) and refuses a version that
adds otherwise. Both wait for row counts on the host, so neither can be captured in a CUDA graph.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_runtime.comm.base import Dispatcher, ReceivedRows, SummingDispatcher
from moe_runtime.comm.deepep_layout import (
    EXPERT_ALIGNMENT,
    arrival_slots,
    block_length,
    equal_blocks,
    expanded_pairs,
    expanded_rows,
    low_latency_pairs,
    low_latency_rows,
    one_slot_tokens,
    slots_by_rank,
    weighted_slots,
)
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.multiple_reduction import MultipleReduction
from moe_runtime.comm.sum_check import SumCase, refuse_faults, sum_fault
from moe_runtime.kernels.schedules import Control, active_control

__all__ = [
    "DeepEPDispatcher",
    "ExpandedBuffer",
    "LowLatencyBuffer",
    "LowLatencyDispatcher",
    "import_deep_ep",
    "open_buffer",
    "open_deepep",
    "prove_sums",
]

BUFFER_CLASSES = ("ElasticBuffer", "EPBuffer")
"""V2's class and V2.5's."""


class ExpandedBuffer(Protocol):
    """What is used of DeepEP's ``ElasticBuffer`` (V2) and ``EPBuffer`` (V2.5)."""

    def dispatch(self, x: torch.Tensor, **arguments: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Received rows, slots' ids, weights, handle, event."""

    def combine(self, x: torch.Tensor, **arguments: Any) -> Any:
        """Sums at the home rank, alone or as first of a tuple."""


class LowLatencyBuffer(Protocol):
    """What is used of DeepEP's V1 ``Buffer``, opened for low latency."""

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, max_tokens: int, num_experts: int, **arguments: Any
    ) -> Any:
        """Received rows, rows per expert, handle, and more."""

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Any
    ) -> Any:
        """Weighted sums at the home rank, alone or as first of a tuple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _HandledRows(ReceivedRows):
    """Rows of a DeepEP call.

    Attributes:
        handle: DeepEP's, for the way back.
        recv: What was received.
        topk_idx: Ids as DeepEP was given them.
        topk_weights: ``[T, K]`` float32 of the rank's own tokens.
    """

    handle: Any
    recv: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


class DeepEPDispatcher(SummingDispatcher):
    """Expanded dispatch and DeepEP's own sum.

    Args:
        buffer: Opened with ``allow_multiple_reduction=presums``.
        rank: This rank.
        first_expert: ``ep_size + 1`` exclusive prefix sums of physical experts per rank.
        num_max_tokens_per_rank: Most tokens of any rank in a step, the same on all ranks.
        presums: Whether ranks add their slots before they send.
        topk_idx_dtype: DeepEP's type of ids.
    """

    def __init__(
        self,
        buffer: ExpandedBuffer,
        rank: int,
        first_expert: Sequence[int],
        num_max_tokens_per_rank: int,
        *,
        presums: bool = False,
        topk_idx_dtype: torch.dtype = torch.int64,
    ) -> None:
        self.buffer = buffer
        self.rank = rank
        self.first_expert = tuple(first_expert)
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.presums = presums
        self.topk_idx_dtype = topk_idx_dtype

    @property
    def num_buffer_bytes(self) -> int:
        """Of DeepEP's buffer, where it tells; else 0."""
        num_bytes = getattr(self.buffer, "num_bytes", 0)
        return num_bytes if isinstance(num_bytes, int) else 0

    def dispatch(
        self,
        x_dp_local: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_rank: Sequence[int],
    ) -> ReceivedRows:
        """See ``SummingDispatcher.dispatch``. One row is received per (token, slot)."""
        _check_step(x_dp_local, tokens_per_rank, self.num_max_tokens_per_rank)
        if active_control() is Control.ARRIVAL_COMBINE:
            order = arrival_slots(topk_idx)
            topk_idx, topk_weights = topk_idx.gather(1, order), topk_weights.gather(1, order)
        elif self.presums:
            order = slots_by_rank(topk_idx, self.first_expert)
            topk_idx, topk_weights = topk_idx.gather(1, order), topk_weights.gather(1, order)
        block = block_length(self.first_expert)
        ids = equal_blocks(topk_idx, self.first_expert).to(self.topk_idx_dtype)
        recv, _, weights, handle, _ = self.buffer.dispatch(
            x_dp_local.contiguous(),
            topk_idx=ids,
            topk_weights=topk_weights.contiguous(),
            num_experts=block * (len(self.first_expert) - 1),
            num_max_tokens_per_rank=self.num_max_tokens_per_rank,
            expert_alignment=EXPERT_ALIGNMENT,
            do_expand=True,
            do_cpu_sync=True,
        )
        own = self.first_expert[self.rank + 1] - self.first_expert[self.rank]
        pairs = expanded_pairs(handle.psum_num_recv_tokens_per_expert, block, own)
        num_pairs = pairs.row.shape[0]
        if recv.shape[0] < num_pairs or weights.dim() != 1 or weights.shape[0] < num_pairs:
            raise RuntimeError(
                f"DeepEP delivered rows {list(recv.shape)} and weights {list(weights.shape)}; an expanded dispatch "
                f"must have one of each for every (token, slot), here {num_pairs}"
            )
        return _HandledRows(
            x_ep_local=recv,
            pairs=pairs,
            weights=weights[:num_pairs],
            layout=None,
            tokens_per_rank=tokens_per_rank,
            handle=handle,
            recv=recv,
            topk_idx=ids,
            topk_weights=topk_weights,
        )

    def combine_sum(self, rows_ep_local: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """See ``SummingDispatcher.combine_sum``."""
        assert isinstance(received, _HandledRows), "received comes from this dispatcher"
        rows = expanded_rows(rows_ep_local, received.recv.shape[0])
        return _first(self.buffer.combine(rows, handle=received.handle, topk_weights=None))


class LowLatencyDispatcher(Dispatcher):
    """V1's low-latency calls as a carrier of unreduced rows.

    Args:
        buffer: Opened for low latency, for ``num_topk * num_max_tokens_per_rank`` tokens of a rank.
        rank: This rank.
        first_expert: ``ep_size + 1`` exclusive prefix sums of physical experts per rank.
        num_max_tokens_per_rank: Most tokens of any rank in a step, the same on all ranks.
    """

    def __init__(
        self, buffer: LowLatencyBuffer, rank: int, first_expert: Sequence[int], num_max_tokens_per_rank: int
    ) -> None:
        self.buffer = buffer
        self.rank = rank
        self.first_expert = tuple(first_expert)
        self.num_max_tokens_per_rank = num_max_tokens_per_rank

    def dispatch(
        self,
        x_dp_local: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens_per_rank: Sequence[int],
    ) -> ReceivedRows:
        """See ``Dispatcher.dispatch``; the pairs' weights are one, rows are weighted when they are home."""
        _check_step(x_dp_local, tokens_per_rank, self.num_max_tokens_per_rank)
        block, ep_size = block_length(self.first_expert), len(self.first_expert) - 1
        x, ids = one_slot_tokens(x_dp_local, equal_blocks(topk_idx, self.first_expert))
        capacity = self.num_max_tokens_per_rank * topk_idx.shape[1]
        plain = _named(self.buffer.low_latency_dispatch, {"use_fp8": False})
        recv, counts, handle, *_ = self.buffer.low_latency_dispatch(
            x, ids, capacity, block * ep_size, **plain
        )
        if not isinstance(recv, torch.Tensor) or recv.dtype != x.dtype:
            raise RuntimeError(f"DeepEP's low-latency dispatch must deliver {x.dtype} rows as they were sent")
        own = self.first_expert[self.rank + 1] - self.first_expert[self.rank]
        pairs = low_latency_pairs(counts, capacity * ep_size, own)
        return _HandledRows(
            x_ep_local=recv.view(-1, recv.shape[-1]),
            pairs=pairs,
            weights=torch.ones(pairs.row.shape[0], device=x.device),
            layout=None,
            tokens_per_rank=tokens_per_rank,
            handle=handle,
            recv=recv,
            topk_idx=ids,
            topk_weights=topk_weights,
        )

    def combine(self, rows_ep_local: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        """See ``Dispatcher.combine``."""
        assert isinstance(received, _HandledRows), "received comes from this dispatcher"
        rows = low_latency_rows(rows_ep_local, received.pairs, received.recv)
        ones = torch.ones(received.topk_idx.shape, device=rows.device)
        out = _first(self.buffer.low_latency_combine(rows, received.topk_idx, ones, received.handle))
        num_topk = received.topk_weights.shape[1]
        return weighted_slots(out, received.topk_idx.view(-1, num_topk), received.topk_weights)


def import_deep_ep() -> ModuleType:
    """The module deep_ep, of a version with V2's buffer.

    Raises:
        ValueError: it is absent or too old; says what to install.
    """
    try:
        module = importlib.import_module("deep_ep")
    except ImportError as error:
        raise ValueError(_missing(f"cannot be imported: {error}")) from error
    if not any(hasattr(module, name) for name in BUFFER_CLASSES):
        raise ValueError(_missing(f"has neither {' nor '.join(BUFFER_CLASSES)}"))
    return module


def open_buffer(
    module: ModuleType,
    device_group: dist.ProcessGroup | None,
    sizes: dict[str, int],
    *,
    allow_multiple_reduction: bool,
) -> ExpandedBuffer:
    """Construct V2's buffer by the names that its constructor has.

    Sizes and direct mode are given where it names them. It must name ``allow_multiple_reduction``, whose default is the
    tree of level ``batch``, and must want nothing that is not known here.

    Args:
        module: deep_ep.
        device_group: The ranks' NCCL group.
        sizes: Of rows and steps.
        allow_multiple_reduction: DeepEP's flag.

    Raises:
        ValueError: the constructor is another one.
    """
    name = next(name for name in BUFFER_CLASSES if hasattr(module, name))
    buffer_class = getattr(module, name)
    arguments = _named(buffer_class, {**sizes, "allow_hybrid_mode": False})
    arguments["allow_multiple_reduction"] = allow_multiple_reduction
    try:
        inspect.signature(buffer_class).bind(device_group, **arguments)
    except TypeError as error:
        raise ValueError(
            f"dispatcher (deepep): this version's deep_ep.{name} cannot be opened with {sorted(arguments)}: {error}"
        ) from error
    buffer: ExpandedBuffer = buffer_class(device_group, **arguments)
    return buffer


def open_deepep(
    group: RankGroup,
    device_group: dist.ProcessGroup | None,
    first_expert: Sequence[int],
    *,
    hidden: int,
    num_topk: int,
    num_max_tokens_per_rank: int,
    dtype: torch.dtype,
    device: torch.device,
    reduction: MultipleReduction,
) -> DeepEPDispatcher:
    """Open DeepEP's buffer and prove its sum; a collective of all ranks.

    Args:
        group: The expert-parallel group, for what the ranks tell each other on the CPU.
        device_group: The same ranks' NCCL group, which DeepEP is given.
        first_expert: ``ep_size + 1`` exclusive prefix sums of physical experts per rank.
        hidden: Columns of a row.
        num_topk: K.
        num_max_tokens_per_rank: Most tokens of any rank in a step.
        dtype: Model dtype.
        device: This rank's GPU.
        reduction: From ``resolve_multiple_reduction``; sets ``allow_multiple_reduction``.

    Raises:
        ValueError: dtype or device will not do, or DeepEP is absent or of a version that is not known.
        InvarianceError: DeepEP's sum is not the tree.
    """
    if device.type != "cuda":
        raise ValueError(f"device ({device.type}) must be cuda with dispatcher deepep")
    if dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"dtype ({name}) must be bfloat16 with dispatcher deepep")
    module = import_deep_ep()
    sizes = {"num_max_tokens_per_rank": num_max_tokens_per_rank, "hidden": hidden, "num_topk": num_topk}
    dispatcher = DeepEPDispatcher(
        open_buffer(module, device_group, sizes, allow_multiple_reduction=reduction.enabled),
        group.rank,
        first_expert,
        num_max_tokens_per_rank,
        presums=reduction.enabled,
        topk_idx_dtype=getattr(module, "topk_idx_t", torch.int64),
    )
    prove_sums(dispatcher, group, first_expert, num_topk, hidden, num_max_tokens_per_rank, device)
    return dispatcher


def prove_sums(
    dispatcher: DeepEPDispatcher | LowLatencyDispatcher,
    group: RankGroup,
    first_expert: Sequence[int],
    num_topk: int,
    hidden: int,
    num_max_tokens_per_rank: int,
    device: torch.device,
) -> None:
    """Run hostile rows through dispatch and combine, with experts that look their outputs up; a collective.

    A row that comes to the wrong expert or with another row's weight gives a wrong sum, too.

    Raises:
        InvarianceError: on every rank alike, where any rank's sums are not the tree's.
    """
    presums = isinstance(dispatcher, DeepEPDispatcher) and dispatcher.presums

    def dispatch_combine(case: SumCase) -> torch.Tensor:
        mine = case.tokens_of(group.rank)
        token = torch.arange(case.rows.shape[0])
        x = torch.zeros(case.rows.shape[0], hidden, dtype=torch.bfloat16)
        x[:, 0], x[:, 1] = token // 256, token % 256  # whole numbers to 256 are exact
        received = dispatcher.dispatch(
            x[mine].to(device),
            case.topk_idx[mine].to(device),
            case.topk_weights[mine].to(device),
            case.tokens_per_rank,
        )
        code = received.x_ep_local[received.pairs.row].cpu().float()
        source = (code[:, 0] * 256 + code[:, 1]).long().clamp(0, len(token) - 1)
        expert = received.pairs.local_expert.cpu() + first_expert[group.rank]
        chosen = case.topk_idx[source] == expert[:, None]
        rows = case.rows[source, chosen.int().argmax(1)].float()
        rows[~chosen.any(1)] = torch.nan
        weighted = (received.weights.cpu()[:, None] * rows).to(torch.bfloat16)
        return dispatcher.combine_sum(weighted.to(device), received)

    fault = sum_fault(
        dispatch_combine,
        rank=group.rank,
        first_expert=first_expert,
        num_topk=num_topk,
        hidden=hidden,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        presums=presums,
    )
    refuse_faults("deepep", [data.decode() for data in group.all_gather_bytes((fault or "").encode())])


def _missing(what: str) -> str:
    return (
        f"dispatcher (deepep) needs the Python package deep_ep, which {what}. Build DeepEP V2 or later from "
        "https://github.com/deepseek-ai/DeepEP for GPUs of compute capability 9.0 or later (V2: CUDA toolkit 12.3, "
        "NCCL 2.30.4; V2.5: 13.1, 2.32.3; or later). The package deep-ep on PyPI is an early V1 and will not do. CPU "
        "ranks cannot use DeepEP"
    )


def _named(function: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Those of ``wanted`` that the function names among its parameters."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in wanted.items() if name in names}


def _check_step(x: torch.Tensor, tokens_per_rank: Sequence[int], most: int) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(
            f"dtype ({str(x.dtype).removeprefix('torch.')}) must be bfloat16 with dispatcher deepep"
        )
    if max(tokens_per_rank) > most:
        raise ValueError(
            f"tokens of a rank ({max(tokens_per_rank)}) must be at most num_max_tokens_per_rank ({most})"
        )


def _first(result: Any) -> torch.Tensor:
    """The rows of a call that may return more."""
    rows = result[0] if isinstance(result, tuple) else result
    assert isinstance(rows, torch.Tensor), "DeepEP returns rows"
    return rows
