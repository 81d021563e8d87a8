"""Which steps run in the decode form, a row per token. Pure policy: both forms give every row the same bits.

The newest tokens of sequences can always run so. Where the decode form is a captured graph, prompts do too in steps of
few tokens: its kernels are the faster ones there, and where the mixed form is no graph, that one's launches alone take
longer than the step (docs/benchmarks.md). In the decode form every row reads the keys before it, in the mixed form a
tile of rows reads them once, so the keys that the prompts' rows read are bounded.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from moe_runtime.engine.scheduler import ScheduledChunk

__all__ = ["MOST_PROMPT_KEYS", "MOST_PROMPT_ROWS", "num_mixed_tokens"]

MOST_PROMPT_ROWS = 192
"""Of a step, where the mixed form is a graph too."""
MOST_PROMPT_KEYS = 1 << 17
"""Keys that all rows of a step's prompts read, in the decode form: for 128 rows after 1,000 tokens each."""


def num_mixed_tokens(chunks: SequenceOf[ScheduledChunk], most_prompt_rows: int) -> int:
    """Tokens of a rank's step for which it takes the mixed form; with none on any rank all run the decode form.

    Args:
        chunks: Of the step.
        most_prompt_rows: ``Runner.most_prompt_rows``.
    """
    mixed = [chunk for chunk in chunks if not chunk.is_decode]
    num_keys = sum(
        chunk.num_tokens * chunk.sequence.num_computed_tokens + chunk.num_tokens * (chunk.num_tokens + 1) // 2
        for chunk in mixed
    )
    num_rows = sum(chunk.num_tokens for chunk in chunks)
    if num_rows <= most_prompt_rows and num_keys <= MOST_PROMPT_KEYS:
        return 0
    return sum(chunk.num_tokens for chunk in mixed)
