"""Which of several faults came first. One that dies takes the others along within milliseconds, and each says why."""

from __future__ import annotations

from collections.abc import Mapping

from moe_runtime.server.watch_messages import LastWords, Verdict

__all__ = ["Evidence"]


class Evidence:
    """What is known of a fault; ``verdict`` weighs it.

    In order: a rank that reports its own failure; one that has gone without a word; one that hangs; one that another
    blames; anything else that a rank says.
    """

    def __init__(self) -> None:
        self._words: dict[int, LastWords] = {}
        self._gone: list[int] = []
        self._hangs: dict[int, str] = {}
        self._reason = ""

    def __bool__(self) -> bool:
        return bool(self._words or self._gone or self._hangs or self._reason)

    @property
    def is_certain(self) -> bool:
        """Whether nothing that may still arrive would change the verdict."""
        return any(words.culprit == rank for rank, words in self._words.items()) or bool(self._hangs)

    def add_words(self, words: LastWords) -> None:
        """A rank has said why it ends."""
        self._words.setdefault(words.rank, words)

    def add_gone(self, rank: int) -> None:
        """A rank's connection has closed."""
        if rank not in self._gone:
            self._gone.append(rank)

    def add_hang(self, rank: int, how: str) -> None:
        """A rank shows no life, or no progress."""
        self._hangs.setdefault(rank, how)

    def add_reason(self, reason: str) -> None:
        """A fault of the front end's own; the first counts."""
        self._reason = self._reason or reason

    def verdict(self, pids: Mapping[int, int]) -> Verdict:
        """The first fault.

        Args:
            pids: Of the ranks, as far as they are known.
        """

        def name(rank: int) -> str:
            return f"rank {rank} (pid {pids[rank]})" if rank in pids else f"rank {rank}"

        for rank, words in self._words.items():
            if words.culprit == rank:
                return Verdict(rank=rank, reason=f"{name(rank)} failed: {words.reason}")
        for rank in self._gone:
            if rank not in self._words:
                return Verdict(
                    rank=rank,
                    reason=f"{name(rank)} has gone without a word: it was killed, or it crashed",
                )
        for rank, how in self._hangs.items():
            return Verdict(rank=rank, reason=f"{name(rank)} hangs: {how}")
        for rank, words in self._words.items():
            if words.culprit is not None:
                said = f"{name(words.culprit)} is at fault, says rank {rank}: {words.reason}"
                return Verdict(rank=words.culprit, reason=said)
        for rank, words in self._words.items():
            return Verdict(reason=f"{name(rank)} ends: {words.reason}")
        assert self._reason, "a verdict needs evidence"
        return Verdict(reason=self._reason)
