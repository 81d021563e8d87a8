"""Whose flag is missing, from the words that a time-out finds."""

from __future__ import annotations

from tests.kernels.triton_interpreter import DEVICE  # isort: skip

import pytest
import torch

from moe_runtime.comm.flag_report import FlagReader, MissingFlags, missing_flags
from moe_runtime.comm.gpu_exchange import flag_name
from moe_runtime.kernels.peer_flags_triton import PeerFlags


def words_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_the_docstring_s_example():
    words = words_of([7, 7, 7], [7, 6, 7], [6, 6, 6])
    assert missing_flags(words, 7, 0) == MissingFlags(channel=1, ranks=(1,), step=7)
    assert missing_flags(words_of([7, 7, 7], [6, 6, 6]), 7, 0) is None


def test_only_ranks_that_hold_this_one_up_are_named():
    """Rank 1 has not come to channel 1; what it waits for itself, if for anything, its own words say."""
    words = words_of([9, 9, 9, 9], [9, 8, 9, 3], [8, 8, 8, 8], [8, 8, 8, 8])
    assert missing_flags(words, 9, 0) == MissingFlags(channel=1, ranks=(1, 3), step=9)
    assert missing_flags(words, 9, 1) is None
    assert missing_flags(words, 8, 0) == MissingFlags(channel=1, ranks=(3,), step=8)


def test_flags_of_the_next_step_are_there_and_channels_that_nobody_uses_are_not_missed():
    words = words_of([6, 6], [2, 2], [5, 4])
    assert missing_flags(words, 5, 0) == MissingFlags(channel=2, ranks=(1,), step=5)


@pytest.mark.parametrize("step", [2**31 - 1, -(2**31), -1, 1])
def test_numbers_may_wrap(step):
    before = -1 if step == 1 else (step - 1 + 2**31) % 2**32 - 2**31  # 0 is left out
    after = 1 if step == -1 else (step + 1 + 2**31) % 2**32 - 2**31
    words = words_of([step, after], [step, before])
    assert missing_flags(words, step, 0) == MissingFlags(channel=1, ranks=(1,), step=step)


def test_a_step_without_peers_misses_nothing():
    assert missing_flags(words_of([0, 0], [5, 4]), 0, 0) is None


def test_the_reason_names_the_rank_in_the_world_and_the_flag():
    words = words_of([7, 7], [7, 7], [7, 7], [6, 7], [6, 6]).to(DEVICE)
    step = torch.tensor([7], dtype=torch.int32, device=DEVICE)
    offsets = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    flags = PeerFlags(words=words, offsets=offsets, step=step, rank=1, size=2)
    reader = FlagReader(flags, flag_name, first_rank=4)
    reason = "rank 4 has not raised the flag of step 7 that says that its expert rows are home in layer 1"
    assert reader.reason() == (reason, 4)
    words[3, 0] = 7
    assert reader.reason() == ("", None)
    words[4, 1] = 7
    assert reader.reason() == (
        reason.replace("expert rows are home in layer 1", "rows are in the tables in layer 2"),
        4,
    )
