"""All-reduce over symmetric memory for the calls of a step: buffers by turns, flags, and the form that a size takes.

Symbols: n ranks.

Two sets of buffers serve all calls of a step (kernels/all_reduce_triton.py says why two): call k takes set k mod 2. A
step with an odd number of calls ends in a barrier of the ranks, so that the next step may begin with the first set.
Addresses and channels are chosen while the launches are made, hence once for a captured graph. Graphs of other sizes
may follow each other in any order.

Numerics: as kernels/all_reduce_triton.py: fp32, the tree over rank index, one rounding; the bits of
``comm.all_reduce``.
"""

from __future__ import annotations

import torch

from moe_runtime.comm.exchange_bytes import ALL_REDUCE_SETS, all_reduce_bytes, all_reduce_channels
from moe_runtime.comm.symmetric_memory import SymmetricSpace
from moe_runtime.kernels.all_reduce_form import prefers_one_shot
from moe_runtime.kernels.all_reduce_triton import AllReduceSchedule, all_reduce_exchange, all_reduce_one_shot
from moe_runtime.kernels.peer_flags_triton import PeerFlags, peer_barrier

__all__ = ["SymmetricAllReduce"]

NUM_SETS = ALL_REDUCE_SETS


class SymmetricAllReduce:
    """One rank's side.

    Args:
        space: Where buffers are carved; every rank makes the same ones.
        flags: Own flags, with ``num_channels`` channels from ``first_channel`` on for this object alone.
        first_channel: See ``flags``.
        max_calls: In a step.
        max_elements: Of a part.
        part_dtype: bfloat16 or float32.
        out_dtype: bfloat16 or float32.
        name: Of the buffers in the space.
    """

    def __init__(
        self,
        space: SymmetricSpace,
        flags: PeerFlags,
        first_channel: int,
        *,
        max_calls: int,
        max_elements: int,
        part_dtype: torch.dtype,
        out_dtype: torch.dtype,
        name: str = "all_reduce",
    ) -> None:
        last = first_channel + self.num_channels(max_calls)
        assert last <= flags.words.shape[0], f"{flags.words.shape[0]} channels, {last} wanted"
        self.flags = flags
        self.first_channel = first_channel
        self.max_calls = max_calls
        self._parts = [space.carve(f"{name}_part{i}", (max_elements,), part_dtype) for i in range(NUM_SETS)]
        self._results = [space.carve(f"{name}_sum{i}", (max_elements,), out_dtype) for i in range(NUM_SETS)]
        self._num_calls = 0

    @staticmethod
    def num_channels(max_calls: int) -> int:
        """Two a call, one for the end of the step."""
        return all_reduce_channels(max_calls)

    @staticmethod
    def num_bytes(max_elements: int, part_dtype: torch.dtype, out_dtype: torch.dtype) -> int:
        """Bytes of the space that the buffers take."""
        return all_reduce_bytes(max_elements, part_dtype.itemsize, out_dtype.itemsize, num_sets=NUM_SETS)

    def part(self, *shape: int) -> torch.Tensor:
        """Where this rank's part of the next call is written, by kernels launched after the call before.

        Args:
            shape: Of the part; at most ``max_elements`` elements.

        Returns:
            Contiguous tensor in the part's dtype; holds anything.
        """
        return _shaped(self._parts[self._num_calls % NUM_SETS].local, shape)

    def reduce(
        self,
        *shape: int,
        residual: torch.Tensor | None = None,
        one_shot: bool | None = None,
        schedule: AllReduceSchedule | None = None,
        pause_ns: torch.Tensor | None = None,
        pdl: bool = False,
    ) -> torch.Tensor:
        """Sum the ranks' parts; every rank makes the same calls with the same shapes.

        Args:
            shape: Of the part.
            residual: The sum's dtype, the same values on every rank; added to the rounded sum.
            one_shot: The form; None: by size. Changes no bit.
            schedule: Instead of the usual one. Changes no bit.
            pause_ns: For race tests, see ``all_reduce_one_shot``.
            pdl: Dependent launch.

        Returns:
            The sum, in the output dtype; read by kernels launched before the call after the next one.
        """
        assert self._num_calls < self.max_calls, f"more than {self.max_calls} calls in a step"
        which = self._num_calls % NUM_SETS
        channel = self.first_channel + 2 * self._num_calls
        part, result = _shaped(self._parts[which].local, shape), _shaped(self._results[which].local, shape)
        if one_shot is None:
            one_shot = prefers_one_shot(part.numel() * part.element_size(), self.flags.size)
        where = (part, self._parts[which].offsets, self.flags, channel, result)
        if one_shot:
            all_reduce_one_shot(*where, residual=residual, pause_ns=pause_ns, schedule=schedule, pdl=pdl)
        else:
            offsets = self._results[which].offsets
            all_reduce_exchange(
                *where, offsets, residual=residual, pause_ns=pause_ns, schedule=schedule, pdl=pdl
            )
        self._num_calls += 1
        return result

    def end_step(self, *, pdl: bool = False) -> None:
        """After the step's last call."""
        if self._num_calls % NUM_SETS:
            peer_barrier(self.flags, self.first_channel + 2 * self.max_calls, pdl=pdl)
        self._num_calls = 0


def _shaped(buffer: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The buffer's first elements."""
    num_elements = torch.Size(shape).numel()
    if num_elements > buffer.numel():
        raise ValueError(f"a part has {num_elements} elements; it must have at most {buffer.numel()}")
    return buffer[:num_elements].view(shape)
