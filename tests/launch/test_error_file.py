"""What torchrun reads when a rank has ended: it is torch's own reader that judges here."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from moe_runtime.launch.error_file import ErrorFile


def _failure(path: Path, exitcode: int = 1) -> ProcessFailure:
    return ProcessFailure(local_rank=0, pid=5, exitcode=exitcode, error_file=str(path))


def _environ(path: Path) -> dict[str, str]:
    return {"TORCHELASTIC_ERROR_FILE": str(path)}


def test_a_rank_that_ends_without_a_word_has_its_last_sign_of_life_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    now_s = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now_s[0])
    file = ErrorFile("1", _environ(path))
    assert _failure(path, -9).timestamp == 1000
    now_s[0] = 2000.7
    file.beat()
    failure = _failure(path, -9)
    assert failure.timestamp == 2000
    assert (
        f"rank 1 (pid {os.getpid()}) ended without a word" in ChildFailedError("x", {1: failure}).format_msg()
    )


def test_the_first_fault_is_torchrun_s_root_cause_whatever_the_order(tmp_path: Path) -> None:
    killed, follower = tmp_path / "killed", tmp_path / "follower"
    ErrorFile("1", _environ(killed)).beat()
    ErrorFile("0", _environ(follower)).write("rank 1 has gone", is_first=False)
    failures = {0: _failure(follower), 1: _failure(killed, -9)}
    assert ChildFailedError("x", failures).get_first_failure()[0] == 1
    own = ErrorFile("2", _environ(tmp_path / "own"))
    own.write("ValueError: broken", is_first=True)
    failures = {0: _failure(follower), 2: _failure(tmp_path / "own")}
    assert ChildFailedError("x", failures).get_first_failure()[0] == 2


def test_the_reason_replaces_what_was_there_and_an_orderly_end_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    file = ErrorFile("0", _environ(path))
    file.write("the front end has gone", is_first=True)
    assert (
        json.loads(path.read_text())["message"]["message"]
        == f"rank 0 (pid {os.getpid()}): the front end has gone"
    )
    file.beat()  # too late to change anything
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_without_torchrun_nothing_is_written(tmp_path: Path) -> None:
    file = ErrorFile("0", {})
    file.beat()
    file.write("reason", is_first=True)
    file.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_stops_nobody(tmp_path: Path) -> None:
    file = ErrorFile("0", _environ(tmp_path / "gone" / "error.json"))
    file.beat()
    file.write("reason", is_first=True)
    file.remove()
