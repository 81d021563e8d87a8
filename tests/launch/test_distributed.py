"""Ranks from torchrun's environment."""

from __future__ import annotations

from typing import Any, cast

import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.launch import distributed
from moe_runtime.launch.distributed import close_ranks, init_ranks


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_without_torchrun_there_is_one_rank() -> None:
    group = init_ranks()
    assert group == RankGroup(rank=0, size=1)
    close_ranks(group)


class _Links:
    """Links that only tell that they have ended."""

    has_ended = False

    def close(self) -> None:
        self.has_ended = True


def test_leaving_ends_the_links_of_both_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(distributed.dist, "barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: calls.append("destroy"))
    world, own = _Links(), _Links()
    group = RankGroup(rank=0, size=4, links=cast(Any, world))
    close_ranks(group, TensorParallel(group=RankGroup(rank=0, size=2, links=cast(Any, own))))
    assert (world.has_ended, own.has_ended, calls) == (True, True, ["barrier", "destroy"])


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, r"WORLD_SIZE \(''\) must be an integer"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, r"RANK \('x'\) must be an integer"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK \(2\) must be in \[0, WORLD_SIZE\)"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR must be set"),
    ],
)
def test_a_bad_environment_is_named(
    environ: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        init_ranks()


@pytest.mark.parametrize(("num_gpus", "expected"), [(4, [3]), (1, [0]), (2, [])])
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_it_is_shown(
    num_gpus: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(distributed.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(distributed.torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(distributed.torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(distributed, "keep_multicast_off", lambda: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda backend, timeout: None)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "3")
    for name, value in (("WORLD_SIZE", "4"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert init_ranks("cuda") == RankGroup(rank=3, size=4)
    assert taken == expected
