"""Which other deployments a check runs on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.llm import LLM
from moe_runtime.verify.topologies import Topology, other_topologies, own_topology
from tests.ranks import RankContext

EP_1 = Topology(ranks="alone")


def spread(dispatcher: Literal["collective", "symmetric"], tp: int = 1) -> Topology:
    return Topology(ranks="all", dispatcher=dispatcher, tp=tp)


def plays(size: int) -> Topology:
    return Topology(ranks="alone", dispatcher="loopback", loopback_ranks=size)


@pytest.mark.parametrize(
    ("own", "num_ranks", "expected"),
    [
        (EP_1, 1, ["loopback EP 2", "loopback EP 4", "loopback EP 8"]),
        (plays(4), 1, ["EP 1", "loopback EP 2", "loopback EP 8"]),
        (plays(3), 1, ["EP 1", "loopback EP 2", "loopback EP 4", "loopback EP 8"]),
        (spread("symmetric"), 2, ["collective tp 1", "symmetric tp 2", "EP 1"]),
        (spread("collective"), 2, ["symmetric tp 1", "collective tp 2", "EP 1"]),
        (spread("symmetric", 2), 2, ["symmetric tp 1", "collective tp 2", "EP 1"]),
        (spread("symmetric"), 3, ["collective tp 1", "symmetric tp 3", "EP 1"]),
        (
            spread("symmetric", 2),
            8,
            ["symmetric tp 1", "collective tp 2", "symmetric tp 4", "symmetric tp 8", "EP 1"],
        ),
    ],
)
def test_level_topology_covers_transports_ep_1_and_tp_sizes(
    own: Topology, num_ranks: int, expected: list[str]
) -> None:
    found = other_topologies(own, num_ranks=num_ranks, level="topology")
    assert sorted(topology.name for topology in found) == sorted(expected)


@pytest.mark.parametrize(
    ("own", "num_ranks", "expected"),
    [
        (EP_1, 1, []),
        (plays(4), 1, []),
        (spread("symmetric"), 2, ["collective tp 1", "loopback EP 2"]),
        (spread("collective"), 8, ["symmetric tp 1", "loopback EP 8"]),
        (spread("symmetric", 2), 4, ["collective tp 2"]),
    ],
)
def test_level_batch_keeps_ep_and_tp_sizes(own: Topology, num_ranks: int, expected: list[str]) -> None:
    for full in (False, True):
        found = other_topologies(own, num_ranks=num_ranks, level="batch", full=full)
        assert [topology.name for topology in found] == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_the_full_form_has_every_pair_and_never_the_own_one(num_ranks: int) -> None:
    own = EP_1 if num_ranks == 1 else spread("symmetric")
    few, all_ = (other_topologies(own, num_ranks=num_ranks, level="topology", full=f) for f in (False, True))
    assert own not in all_
    assert set(few) <= set(all_)
    assert len(set(all_)) == len(all_)
    assert {topology.loopback_ranks for topology in all_} - {1} == {2, 4, 8}
    if num_ranks > 1:
        pairs = {(t.dispatcher, t.tp) for t in all_ if t.ranks == "all"} | {("symmetric", 1)}
        tps = [tp for tp in (1, 2, 4) if tp <= num_ranks]
        assert pairs == {(transport, tp) for transport in ("collective", "symmetric") for tp in tps}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"ranks": "all", "dispatcher": "loopback"},
            r"ranks \(all\) must be alone with dispatcher \(loopback\)",
        ),
        ({"ranks": "alone", "tp": 2}, r"tp \(2\) must be 1"),
        ({"ranks": "alone", "dispatcher": "symmetric"}, r"dispatcher \(symmetric\) collective or loopback"),
        (
            {"ranks": "all", "loopback_ranks": 4},
            r"loopback_ranks \(4\) must be 1 with dispatcher \(collective\)",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**fields)


def test_only_what_the_deployment_changes_changes() -> None:
    own = EngineConfig(dtype="float32", seed=3, max_num_seqs=5, dispatcher="symmetric")
    config = plays(4).engine_config(own)
    assert (config.dispatcher, config.tp, config.loopback_ranks) == ("loopback", 1, 4)
    assert (config.dtype, config.seed, config.max_num_seqs) == ("float32", 3, 5)


def test_a_refusal_names_the_setting_and_all_else_is_a_fault() -> None:
    refusal = ValueError("tp (2) is not implemented on the GPU yet; set device to cpu")
    assert spread("collective", 2).is_refused_by(refusal)
    assert not EP_1.is_refused_by(refusal)
    no_memory = ValueError("dispatcher (symmetric) must be collective or auto here: two ranks share a GPU")
    assert spread("symmetric").is_refused_by(no_memory)
    assert not spread("collective", 2).is_refused_by(no_memory)
    assert not spread("symmetric", 2).is_refused_by(ValueError("shape mismatch"))


def own_of_a_rank(context: RankContext, model: str, tp: int, dispatcher: str) -> tuple[Topology, Topology]:
    """What a loaded model says, and what its settings change into themselves."""
    llm = LLM(model, group=context.group, tp=tp, dispatcher=dispatcher)
    own = own_topology(llm)
    again = own.engine_config(llm.config)
    return own, Topology(ranks="all", dispatcher=again.dispatcher, tp=again.tp)


def test_the_own_topology_is_that_of_the_loaded_model(
    ranks: Callable[..., list[Any]], tiny_model: Path
) -> None:
    assert own_topology(LLM(str(tiny_model))) == EP_1
    assert own_topology(LLM(str(tiny_model), dispatcher="loopback", loopback_ranks=4)) == plays(4)
    assert ranks(2, own_of_a_rank, str(tiny_model), 2, "auto") == [(spread("symmetric", 2),) * 2] * 2
    assert ranks(2, own_of_a_rank, str(tiny_model), 1, "collective") == [(spread("collective"),) * 2] * 2
