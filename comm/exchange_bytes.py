"""Bytes of the buffers through which ranks on GPUs exchange rows, from dimensions alone. Pure, no torch.

``ExchangeSizes`` (gpu_exchange.py) has the tensors' shapes; the engine sizes its KV cache, and the planner a fleet, by
this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = [
    "ExchangeBytes",
    "all_reduce_bytes",
    "all_reduce_channels",
    "carved",
    "row_gather_bytes",
    "row_gather_channels",
    "row_gather_rows",
    "shard_sum_bytes",
]

ALIGNMENT_BYTES = 1024
"""Where a tensor in a region starts, so that offsets are multiples of 16 elements for every dtype."""
ALL_REDUCE_SETS = 2
"""Of buffers that the all-reduces of a step take by turns."""
ROW_GATHER_SETS = 2
"""Of buffers that the gathers of a step take by turns."""
MAX_LOGIT_ROWS = 256
"""Most rows whose logits a tensor-parallel group gathers at once."""
MAX_SLICE = 16384
"""Most positions of a token table that experts work through at a time."""
MAX_FIXED_ROWS = 256
"""Most tokens of a rank in an exchange of fixed sizes by a collective; larger steps run outside of graphs."""
MAX_GRAPH_ROWS = 2048
"""Most tokens of a rank in any graph."""
MAX_SLOT_POSITIONS = 256
"""Most positions of a table whose rows are listed by expert, a slot table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeBytes:
    """What buffers are sized from.

    Attributes:
        size: W, ranks.
        max_rows: Most tokens of a rank in a step.
        hidden, num_topk, num_layers: H, K and the layers with experts.
        item_bytes: Of an element of the model dtype.
        presums: A rank adds the slots that it holds of a token before they travel.
    """

    size: int
    max_rows: int
    hidden: int
    num_topk: int
    num_layers: int
    item_bytes: int
    presums: bool = False

    @property
    def slice_positions(self) -> int:
        """Most positions of a slice of the table; no less than a slot table's."""
        return max(MAX_SLOT_POSITIONS, min(self.size * self.max_rows, MAX_SLICE))

    @property
    def rows_home(self) -> int:
        """Rows that come home of each token."""
        return self.size if self.presums else self.num_topk

    @property
    def row_bytes(self) -> int:
        """A hidden row."""
        return self.hidden * self.item_bytes

    @property
    def table_bytes(self) -> int:
        """A token table: rows, ids, weights."""
        positions = self.size * self.max_rows
        return carved(positions * self.row_bytes) + 2 * carved(positions * self.num_topk * 4)

    @property
    def symmetric_bytes(self) -> int:
        """A rank's region of symmetric memory."""
        rows = carved(self.max_rows * self.rows_home * self.row_bytes)
        return self.table_bytes + rows + carved(2 * self.num_layers * self.size * 4)

    @property
    def collective_bytes(self) -> int:
        """Most bytes that a rank needs: its table and its rows, kept, and copies of both while they travel."""
        # A table, what is sent into it and own rows; fixed rows, what is sent of them and what comes back.
        num_bytes = 2 * self.table_bytes + self.table_bytes // self.size
        if self.presums:
            return num_bytes + 3 * self.size * self.max_rows * self.row_bytes
        fixed_rows = self.size * min(self.max_rows, MAX_FIXED_ROWS) * self.num_topk
        # Of a step of exact sizes: a slice's rows, those of them that travel, and what is home, once and as received.
        exact_rows = (2 * self.slice_positions + 2 * self.max_rows) * self.num_topk
        return num_bytes + (3 * fixed_rows + exact_rows) * self.row_bytes

    @property
    def rehearsal_bytes(self) -> int:
        """Most bytes that a graph's rehearsal takes for a while: a region of its own, and a slice where rows are added
        before they go home."""
        own = replace(self, max_rows=min(self.max_rows, MAX_GRAPH_ROWS))
        slice_bytes = own.slice_positions * own.num_topk * own.row_bytes
        return own.symmetric_bytes + own.presums * slice_bytes

    @property
    def expanded_bytes(self) -> int:
        """Most bytes where every (token, slot) is received as a row: all of all ranks, as received, picked in the order
        of experts, weighted, and in the transport's own buffer."""
        return 4 * self.size * self.max_rows * self.num_topk * self.row_bytes


def shard_sum_bytes(size: int, hidden: int, num_layers: int, max_rows: int, item_bytes: int) -> int:
    """Bytes of a rank's region for the sums of a tensor-parallel group: parts in fp32 and results, and flags.

    Args:
        size: Ranks of the group.
        hidden, num_layers, max_rows: H, layers with a sum, most rows of a step.
        item_bytes: Of an element of the model dtype.
    """
    buffers = all_reduce_bytes(max_rows * hidden, 4, item_bytes)
    return buffers + carved(4 * all_reduce_channels(num_layers) * size)


def row_gather_bytes(
    size: int, hidden: int, vocab: int, num_layers: int, max_rows: int, item_bytes: int
) -> int:
    """Bytes of a rank's region for the rows and the fp32 logits that a tensor-parallel group gathers, and flags.

    Args:
        size: Ranks of the group.
        hidden, vocab, num_layers, max_rows: H, ids, layers with a gather, most rows of a step.
        item_bytes: Of an element of the model dtype.
    """
    rows = carved(row_gather_rows(size, max_rows) * hidden * item_bytes)
    logits = carved(4 * MAX_LOGIT_ROWS * -(-vocab // size))
    return ROW_GATHER_SETS * rows + logits + carved(4 * row_gather_channels(num_layers) * size)


def row_gather_rows(size: int, max_rows: int) -> int:
    """Of a set: two of each token at home here, or one of every token."""
    return max(max_rows, 2 * -(-max_rows // size))


def row_gather_channels(num_layers: int) -> int:
    """Channels of flags of a step's gathers: the embedding's, one a layer, the logits', the end of the step."""
    return num_layers + 3


def all_reduce_bytes(
    max_elements: int, part_item_bytes: int, out_item_bytes: int, *, num_sets: int = ALL_REDUCE_SETS
) -> int:
    """Bytes of the buffers of a step's all-reduces: a part and a result in each set.

    Args:
        max_elements: Of a part.
        part_item_bytes, out_item_bytes: Of an element of a part and of a result.
        num_sets: Taken by turns.
    """
    return num_sets * (carved(part_item_bytes * max_elements) + carved(out_item_bytes * max_elements))


def all_reduce_channels(max_calls: int) -> int:
    """Channels of flags of a step's all-reduces: two a call, one for the end of the step."""
    return 2 * max_calls + 1


def carved(num_bytes: int) -> int:
    """Bytes that a tensor takes from a region, up to the next one's start."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
