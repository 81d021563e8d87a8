"""Step vectors beside a step: two threads per rank, each on channels of its own."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from moe_runtime.comm.control_group import open_control_group
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.shared_memory import connect_shared_memory
from moe_runtime.errors import PeerError
from tests.ranks import RankContext

NUM_TURNS = 60


def open_group(context: RankContext, linked: bool) -> RankGroup:
    if not linked:
        return context.group
    links = connect_shared_memory(context.group, 30.0, 30.0)
    assert not isinstance(links, str), links
    return replace(context.group, links=links)


def exchange_in_two_threads(context: RankContext, linked: bool) -> tuple[bool, bool]:
    """Every rank's threads dawdle at other turns, so that on no two ranks they interleave alike."""
    group = open_group(context, linked)
    control = open_control_group(group)
    rows: list[torch.Tensor] = []

    def steps() -> None:
        for turn in range(NUM_TURNS):
            if (turn + context.rank) % 5 == 0:
                time.sleep(0.002)
            rows.append(group.all_gather(torch.tensor([float(turn), float(context.rank)])))

    thread = threading.Thread(target=steps)
    thread.start()
    vectors = []
    for turn in range(NUM_TURNS):
        if (turn * (context.rank + 1)) % 7 == 0:
            time.sleep(0.002)
        vectors.append(control.all_gather(torch.tensor([turn, -context.rank])))
    thread.join()
    ranks = range(context.world_size)
    rows_right = [r.tolist() == [[float(t), float(k)] for k in ranks] for t, r in enumerate(rows)]
    vectors_right = [v.tolist() == [[t, -k] for k in ranks] for t, v in enumerate(vectors)]
    return len(rows) == NUM_TURNS and all(rows_right), all(vectors_right)


@pytest.mark.parametrize("linked", [True, False])
def test_vectors_and_rows_keep_apart(ranks, linked: bool) -> None:
    assert ranks(3, exchange_in_two_threads, linked) == [(True, True)] * 3


def exchange_on_one_channel(context: RankContext) -> str:
    """What the channels are for: rank 0 sends its vector before the rows of the step, rank 1 after them."""
    group = open_group(context, linked=True)
    vector, rows = torch.zeros(3, dtype=torch.int64), torch.zeros(5, dtype=torch.float32)
    try:
        for x in (vector, rows) if context.rank == 0 else (rows, vector):
            group.all_gather(x)
    except PeerError as error:
        return str(error)
    return ""


def test_control_on_one_channel_the_ranks_meet_in_different_exchanges(ranks) -> None:
    assert all("the ranks run different steps" in text for text in ranks(2, exchange_on_one_channel))


def test_one_rank_needs_no_channels() -> None:
    alone = RankGroup()
    assert open_control_group(alone) is alone
