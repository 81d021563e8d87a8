"""Which schedules an op may use on this machine. A schedule is free; the tree it evaluates is not.

The canonical GEMM schedule on the CPU is row tiles of 16 by column tiles of 64, one thread. Taller row tiles are used
where the audit (kernels/audit.py) found them bit-equal on this machine for this K, and nowhere else.

``Control`` switches one tree off on purpose. It exists so that checks can be seen to fail; nothing but a check sets it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

__all__ = [
    "CANDIDATE_ROW_TILES",
    "COLUMN_TILE",
    "ROW_TILE",
    "TREE_CONTROLS",
    "Control",
    "active_control",
    "control",
    "row_tiles",
    "set_row_tiles",
]

ROW_TILE = 16
COLUMN_TILE = 64
CANDIDATE_ROW_TILES = (256, 64)

_row_tiles: dict[int, tuple[int, ...]] = {}


class Control(StrEnum):
    """A tree switched off on purpose."""

    NONE = "none"
    SPLIT_K_GEMM = "split-k-gemm"  # K cut in a number of parts chosen from the number of rows
    FREE_GEMM = "free-gemm"  # the library's GEMM at the batch's own row count
    ARRIVAL_COMBINE = (
        "arrival-combine"  # slots added in an order that depends on the row's place in the batch
    )
    BATCH_ATTENTION = "batch-attention"  # KV chunk length chosen from the number of rows
    BATCH_NOISE = "batch-noise"  # sampling noise keyed by the row's place in the batch
    PREFIX_COLLISION = "prefix-collision"  # cached prefixes told apart by their lengths, not by their tokens
    DRAFT_BONUS = "draft-bonus"  # the token after accepted drafts taken from the last draft's row
    SHIFTED_MASKS = "shifted-masks"  # a row's grammar mask taken from the next row of the batch that has one


TREE_CONTROLS = (
    Control.SPLIT_K_GEMM,
    Control.FREE_GEMM,
    Control.ARRIVAL_COMBINE,
    Control.BATCH_ATTENTION,
    Control.BATCH_NOISE,
)
"""Those that any batch shows; the others need what they are about: cached prefixes, drafts, grammars."""

_control = Control.NONE


def active_control() -> Control:
    """The control in force, ``NONE`` in every real run."""
    return _control


@contextmanager
def control(which: Control) -> Iterator[None]:
    """Switch one tree off inside the block."""
    global _control
    before = _control
    _control = which
    try:
        yield
    finally:
        _control = before


def row_tiles(k: int) -> tuple[int, ...]:
    """Row tiles allowed for chains of length ``k``, tallest first; always ends with the canonical one."""
    return _row_tiles.get(k, (ROW_TILE,))


def set_row_tiles(k: int, tiles: tuple[int, ...]) -> None:
    """Record the audit's result for chains of length ``k``."""
    assert tiles[-1:] == (ROW_TILE,), f"row tiles {tiles} must end with the canonical {ROW_TILE}"
    _row_tiles[k] = tiles
