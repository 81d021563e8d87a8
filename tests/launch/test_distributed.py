"""Process groups from the launcher's environment."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from typing import Any, cast

import pytest

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.launch import distributed
from moe_runtime.launch.distributed import close_ranks, init_ranks
from moe_runtime.launch.environment import read_environment


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NODELIST", "LWS_GROUP_SIZE"):
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
    monkeypatch.setattr(RankGroup, "all_gather_bytes", lambda *_: calls.append("together"))
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: calls.append("destroy"))
    ends = [_Links() for _ in range(4)]
    links, watch, own_links, own_watch = (cast(Any, end) for end in ends)
    group = RankGroup(rank=0, size=4, links=links, watch=watch)
    own = RankGroup(rank=0, size=2, links=own_links, watch=own_watch)
    close_ranks(group, TensorParallel(group=own))
    assert all(end.has_ended for end in ends)
    assert calls == ["together", "destroy"]


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
    monkeypatch.setattr(distributed, "_meet", lambda place: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda backend, **options: None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name, value in _variables(rank=3, size=4, port=1).items():
        monkeypatch.setenv(name, value)
    group = init_ranks("cuda")
    assert (group.rank, group.size, group.local_rank, group.local_size) == (3, 4, 3, 4)
    assert taken == expected


def _variables(*, rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip


def test_rank_0_listens_at_the_address_alone() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = read_environment(_variables(rank=0, size=2, port=port))
    with distributed._listen(place) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        with pytest.raises(
            ValueError, match=rf"MASTER_PORT \({port}\) must be .* a free port: Address already in use"
        ):
            distributed._listen(place)
    elsewhere = replace(place, address="192.0.2.77")
    with pytest.raises(
        ValueError, match=r"MASTER_ADDR \(192.0.2.77\) .* must be an address of rank 0's host"
    ):
        distributed._listen(elsewhere)


def test_gloo_stays_on_loopback_unless_ranks_are_on_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    place = read_environment(_variables(rank=0, size=4, port=1) | {"MASTER_ADDR": "192.0.2.77"})
    assert distributed._choose_interface(place) == "127.0.0.1"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    spread = replace(place, local_size=2, address="127.0.0.1")
    with pytest.raises(ValueError, match=r"MASTER_ADDR \(127.0.0.1\) must not be a loopback address"):
        distributed._choose_interface(spread)
    assert distributed._choose_interface(replace(spread, interface="lo,eth0")) == "127.0.0.1"


def test_ranks_that_do_not_come_are_told_where_they_were_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "RENDEZVOUS_TIMEOUT_S", 0.2)
    for name, value in _variables(rank=1, size=2, port=1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"rank 1 has not met the 2 ranks at 127.0.0.1 port 1 \(variables\)"):
        init_ranks()
