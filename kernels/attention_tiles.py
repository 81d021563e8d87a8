"""Which program of a many-row attention kernel takes which rows: tiles of one sequence's consecutive tokens.

Pure functions of the step's lengths, made once a step on the host and used by every layer. Tiles are a schedule: they
change no bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["make_row_tiles"]


def make_row_tiles(
    query_lens: Sequence[int],
    start_positions: Sequence[int],
    *,
    num_groups: int,
    block_rows: int,
    sequences: Sequence[int] | None = None,
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """Cut the tokens of a step into tiles of one sequence each, those with most keys first (which is free to change).

    Args:
        query_lens: Tokens of each sequence in the step; tokens of the step are in this order.
        start_positions: Absolute position of each sequence's first token of the step.
        num_groups: G; a tile takes up to ``block_rows // G`` tokens.
        block_rows: Of the schedule that will run.
        sequences: Only these; None for all. A step may run short sequences (decode rows) in tiles of 16 and the others
            in tiles of 128 by two calls of each function.

    Returns:
        ``[num_tiles, 4]`` int32: sequence, first token in the step, number of tokens, position of the first token.

    Example: ``query_lens`` 5 and 1, ``start_positions`` 0 and 9, G = 8, 16 rows (two tokens a tile) give
    ``[1, 5, 1, 9], [0, 4, 1, 4], [0, 2, 2, 2], [0, 0, 2, 0]``.
    """
    lens = np.asarray(query_lens, dtype=np.int64)
    starts = np.asarray(start_positions, dtype=np.int64)
    tokens_per_tile = block_rows // num_groups
    wanted = np.zeros(len(lens), dtype=bool)
    wanted[np.arange(len(lens)) if sequences is None else np.asarray(sequences, dtype=np.int64)] = True
    num_tiles = np.where(wanted, -(-lens // tokens_per_tile), 0)
    sequence = np.repeat(np.arange(len(lens)), num_tiles)
    tile = np.arange(len(sequence)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    first = tile * tokens_per_tile
    count = np.minimum(lens[sequence] - first, tokens_per_tile)
    position = starts[sequence] + first
    token = (np.cumsum(lens) - lens)[sequence] + first
    tiles = np.stack((sequence, token, count, position), axis=1).astype(np.int32)
    return tiles[np.argsort(-(position + count), kind="stable")]
