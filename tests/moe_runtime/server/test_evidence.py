"""Which of several faults counts as the first."""

from __future__ import annotations

from moe_runtime.server.evidence import Evidence
from moe_runtime.server.watch_messages import LastWords

PIDS = {0: 100, 1: 101, 2: 102}


def test_no_evidence_is_false() -> None:
    evidence = Evidence()
    assert not evidence
    evidence.add_gone(1)
    assert evidence


def test_a_rank_that_was_killed_is_named_and_not_those_it_took_along() -> None:
    evidence = Evidence()
    evidence.add_gone(0)  # seen first, and blamed by nobody
    evidence.add_words(LastWords(rank=0, reason="rank 1 has gone: it closed its link", culprit=1))
    evidence.add_gone(1)
    verdict = evidence.verdict(PIDS)
    assert verdict.rank == 1
    assert verdict.reason == "rank 1 (pid 101) has gone without a word: it was killed, or it crashed"
    assert not evidence.is_certain


def test_without_the_words_the_lowest_that_was_seen_is_named() -> None:
    """The control: it is the words that clear rank 0."""
    evidence = Evidence()
    evidence.add_gone(0)
    evidence.add_gone(1)
    assert evidence.verdict(PIDS).rank == 0


def test_a_rank_s_own_failure_beats_everything() -> None:
    evidence = Evidence()
    evidence.add_gone(0)
    evidence.add_words(LastWords(rank=1, reason="rank 2 has gone", culprit=2))
    evidence.add_words(LastWords(rank=2, reason="ValueError: broken", culprit=2))
    verdict = evidence.verdict(PIDS)
    assert (verdict.rank, verdict.reason) == (2, "rank 2 (pid 102) failed: ValueError: broken")
    assert evidence.is_certain


def test_a_hang_beats_blame_and_blame_beats_words_without_a_culprit() -> None:
    evidence = Evidence()
    evidence.add_reason("the front end has failed")
    assert evidence.verdict({}).reason == "the front end has failed"
    evidence.add_words(LastWords(rank=0, reason="a collective failed"))
    assert evidence.verdict({}).reason == "rank 0 ends: a collective failed"
    evidence.add_words(LastWords(rank=1, reason="rank 2 is late", culprit=2))
    verdict = evidence.verdict(PIDS)
    assert (verdict.rank, verdict.reason) == (2, "rank 2 (pid 102) is at fault, says rank 1: rank 2 is late")
    evidence.add_hang(0, "no sign of life in 5.0 s")
    verdict = evidence.verdict(PIDS)
    assert (verdict.rank, verdict.reason) == (0, "rank 0 (pid 100) hangs: no sign of life in 5.0 s")


def test_the_first_words_of_a_rank_count() -> None:
    evidence = Evidence()
    evidence.add_words(LastWords(rank=0, reason="first"))
    evidence.add_words(LastWords(rank=0, reason="second", culprit=0))
    assert evidence.verdict({}).reason == "rank 0 ends: first"
