"""Which transport is taken, and what is said about it."""

from __future__ import annotations

import sys

import pytest
import torch

from moe_runtime.comm import shared_memory, transports
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.transports import open_transport
from tests.comm import fake_deep_ep
from tests.ranks import RankContext


def refuse_to_listen(context: RankContext) -> tuple[str, str, str]:
    """Rank 1 has no shared files; every rank must come to the same end."""
    memfd_create = shared_memory.os.memfd_create
    if context.rank == 1:
        del shared_memory.os.memfd_create
    try:
        found = open_transport(context.group, "auto")
        try:
            open_transport(context.group, "symmetric")
        except ValueError as error:
            return found.name, found.reason, str(error)
    finally:
        shared_memory.os.memfd_create = memfd_create
    return found.name, found.reason, ""


def test_where_it_cannot_be_auto_says_why_and_symmetric_is_refused(ranks):
    for name, reason, error in ranks(3, refuse_to_listen):
        assert name == "collective"
        assert "rank 1 cannot listen: this system has no anonymous shared files" in reason
        assert "dispatcher (symmetric) must be collective or auto here: rank 1" in error


def choose(context: RankContext) -> list[tuple[str, str, bool]]:
    found = [open_transport(context.group, wanted) for wanted in ("auto", "collective", "symmetric")]
    assert all(t.group.watch is not None for t in found)
    return [(t.name, t.reason, t.group.links is not None) for t in found]


def test_the_choice_and_its_reason(ranks):
    for found in ranks(2, choose):
        assert found == [
            ("symmetric", "all ranks share a host's memory", True),
            ("collective", "asked for", False),
            ("symmetric", "asked for", True),
        ]
    assert open_transport(RankGroup(), "symmetric").reason == "one rank: nothing travels"


def choose_deepep(context: RankContext, installed: list[bool]) -> str:
    """As if the ranks had GPUs; what is said, or the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deep_ep", fake_deep_ep if installed[context.rank] else None)
        patch.setattr(transports, "shared_gpu_fault", lambda *_: "")
        try:
            found = open_transport(context.group, "deepep", torch.device("cuda"))
        except ValueError as error:
            return str(error)
        return f"{found.name}: {found.reason}"


def test_deepep_is_for_gpus_where_every_rank_has_it(ranks):
    for message in ranks(2, choose_deepep, [True, True]):
        assert message == "deepep: asked for; deep_ep of unknown version"
    for message in ranks(2, choose_deepep, [True, False]):
        assert message.startswith("rank 1: dispatcher (deepep) needs the Python package deep_ep")
    for size in (1, 2):
        with pytest.raises(
            ValueError, match=r"dispatcher \(deepep\) must be .* with device cpu: .* GPUs only"
        ):
            open_transport(RankGroup(size=size), "deepep")
    with pytest.raises(ValueError, match=r"dispatcher \(deepep\)"):
        open_transport(RankGroup(), "deepep", torch.device("cuda"))


def open_between_gpus(
    context: RankContext, shared: str, links: str, watch: str = ""
) -> tuple[str, bool, list[str]]:
    """As if the ranks had GPUs: the choice or the error, whether they watch each other, and what the log says."""
    told: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transports, "shared_gpu_fault", lambda group, device: shared)
        patch.setattr(transports, "peer_access_fault", lambda group, device: "")
        patch.setattr(transports.logger, "warning", lambda text, *values: told.append(text % values))
        if links:
            patch.setattr(transports, "connect_shared_memory", lambda group, timeout_s: links)
        if watch:
            patch.setattr(transports, "connect_pulses", lambda group: watch)
        try:
            found = open_transport(context.group, "collective", torch.device("cuda"))
            return found.name, found.group.watch is not None, told
        except ValueError as error:
            return str(error), False, told


def test_ranks_that_share_a_gpu_are_refused(ranks):
    expected = "device (cuda) must be cpu with more ranks on a host than GPUs: rank 0 and rank 1 share a GPU"
    assert ranks(2, open_between_gpus, "rank 0 and rank 1 share a GPU", "") == [(expected, False, [])] * 2


def test_ranks_watch_each_other_with_and_without_shared_memory_and_that_none_does_is_said_once(ranks):
    several = "the ranks are on several hosts"
    assert ranks(2, open_between_gpus, "", "") == [("collective", True, [])] * 2
    assert ranks(2, open_between_gpus, "", several) == [("collective", True, [])] * 2
    warning = "ranks do not watch each other (rank 1 cannot listen): one that dies is noticed after 300 s"
    found = ranks(2, open_between_gpus, "", several, "rank 1 cannot listen")
    assert found == [("collective", False, [warning]), ("collective", False, [])]
