"""The axis of other deployments: it passes, and it fails where one of them adds in another order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.comm.base import ReceivedRows
from moe_runtime.comm.collective import CollectiveDispatcher
from moe_runtime.comm.loopback import LoopbackDispatcher
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.llm import LLM
from moe_runtime.kernels.schedules import TREE_CONTROLS, Control
from moe_runtime.verify import runner as runner_module
from moe_runtime.verify.axes import TOPOLOGIES_ABSENT
from moe_runtime.verify.checker import ProgressFactory, check
from moe_runtime.verify.config import CheckConfig
from moe_runtime.verify.report import CheckExit, CheckReport
from tests.ranks import RankContext

MakeConfig = Callable[..., CheckConfig]
Combine = Callable[[Any, torch.Tensor, ReceivedRows], torch.Tensor]


def slots_backwards(plain: Combine, where: Callable[[Any], bool]) -> Combine:
    """A combine that hands out a token's rows from the last slot to the first."""

    def combine(self: Any, rows_ep_local: torch.Tensor, received: ReceivedRows) -> torch.Tensor:
        rows = plain(self, rows_ep_local, received)
        return rows.flip(1) if where(self) else rows

    return combine


def test_an_order_changed_with_four_ranks_alone_is_found_there(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = slots_backwards(LoopbackDispatcher.combine, lambda dispatcher: dispatcher.num_ranks == 4)
    monkeypatch.setattr(LoopbackDispatcher, "combine", changed)
    report = check(llm, small_check(axes=("again", "topology"), max_tokens=8), progress)
    again, topology = report.axes
    assert again.passed
    assert not topology.passed
    assert {name: count > 0 for name, count in topology.deployments.items()} == {
        "loopback EP 2": False,
        "loopback EP 4": True,
        "loopback EP 8": False,
    }
    assert topology.first_difference is not None
    assert topology.first_difference.run == "loopback EP 4"
    assert 0 < topology.num_forced_differing <= topology.num_forced_tokens == 64
    assert report.exit_code is CheckExit.DIFFERENT
    assert report.verdicts()["topology"] == "different"


def test_the_model_can_be_called_again_afterwards(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    config = small_check(axes=("topology",), max_tokens=3)
    first, second = (check(llm, config, progress) for _ in range(2))
    assert first.digest == second.digest
    assert {report.exit_code for report in (first, second)} == {CheckExit.EQUAL}


def test_other_deployments_add_no_bit_to_the_digest(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    digests = {
        check(llm, small_check(axes=axes, max_tokens=3), progress).digest
        for axes in (("again",), ("topology",))
    }
    assert len(digests) == 1


@pytest.mark.parametrize("which", TREE_CONTROLS)
def test_a_control_is_seen_there_and_fails_no_self_check(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory, which: Control
) -> None:
    report = check(
        llm, small_check(control=which.value, axes=("topology",), num_prompts=16, max_tokens=16), progress
    )
    assert report.noticed_by == ["topology"]
    assert all(report.axes[0].deployments.values())


def test_where_no_other_deployment_can_be_nothing_is_proved(
    llm: LLM, small_check: MakeConfig, progress: ProgressFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "lack_of_room", lambda *_: "no room")
    report = check(llm, small_check(axes=("again", "topology"), max_tokens=2), progress)
    axis = report.axes[1]
    assert axis.finding.startswith(
        "not applicable: no other deployment can be here; loopback EP 2 not run: no room"
    )
    assert list(axis.not_run) == ["loopback EP 2", "loopback EP 4", "loopback EP 8"]
    assert not axis.passed
    assert report.exit_code is CheckExit.EQUAL
    assert report.verdicts()["topology"] == "not run"
    alone = check(llm, small_check(axes=("topology",), max_tokens=2), progress)
    assert alone.exit_code is CheckExit.DIFFERENT


def test_one_rank_at_level_batch_has_no_other_deployment(
    tiny_model: Path, small_check: MakeConfig, progress: ProgressFactory
) -> None:
    llm = LLM(str(tiny_model), invariance="batch")
    report = check(llm, small_check(axes=("again", "topology"), max_tokens=2), progress)
    assert report.axes[1].finding == TOPOLOGIES_ABSENT
    assert report.exit_code is CheckExit.EQUAL


def check_on_a_rank(
    context: RankContext, model: str, tp: int, full: bool, break_: str, refused_tps: Sequence[int]
) -> CheckReport:
    """The axis alone; where ``break_`` names a transport, its combine hands out slots backwards on rank 1."""
    from contextlib import contextmanager

    @contextmanager
    def silent(what: str) -> Any:
        yield lambda done, total: None

    def is_broken(dispatcher: CollectiveDispatcher) -> bool:
        transport = "collective" if dispatcher.group.links is None else "symmetric"
        return context.rank == 1 and dispatcher.group.size > 1 and transport == break_

    plain_combine, plain_plan = CollectiveDispatcher.combine, runner_module.plan_model

    def plan(config: EngineConfig, *arguments: Any) -> Any:
        if config.tp in refused_tps:
            raise ValueError(f"tp ({config.tp}) is not implemented on the GPU yet; set device to cpu")
        return plain_plan(config, *arguments)

    engine = EngineConfig(model=model, tp=tp)
    config = CheckConfig(num_prompts=5, max_tokens=4, axes=("topology",), full=full, engine=engine)
    llm = LLM.from_config(config.engine, group=context.group)
    CollectiveDispatcher.combine = slots_backwards(plain_combine, is_broken)  # type: ignore[method-assign]
    runner_module.plan_model = plan  # type: ignore[assignment]
    try:
        return check(llm, config, silent)
    finally:
        CollectiveDispatcher.combine = plain_combine  # type: ignore[method-assign]
        runner_module.plan_model = plain_plan


def test_two_ranks_cover_transports_ep_1_and_tp_2(ranks: Callable[..., list[Any]], tiny_model: Path) -> None:
    reports = ranks(2, check_on_a_rank, str(tiny_model), 1, False, "", ())
    for report in reports:
        (axis,) = report.axes
        assert axis.finding == "equal on collective tp 1, symmetric tp 2, EP 1"
        assert axis.num_cases == 3 * 5
        assert report.exit_code is CheckExit.EQUAL
    assert reports[0].digest == reports[1].digest


def test_the_full_form_on_groups_of_two_has_every_pair(
    ranks: Callable[..., list[Any]], tiny_model: Path
) -> None:
    report = ranks(2, check_on_a_rank, str(tiny_model), 2, True, "", ())[0]
    names = ["collective tp 1", "symmetric tp 1", "collective tp 2", "EP 1"]
    names += [f"loopback EP {size}" for size in (2, 4, 8)]
    assert report.axes[0].deployments == dict.fromkeys(names, 0)
    assert report.axes[0].num_cases == 7 * 10
    assert report.exit_code is CheckExit.EQUAL


def test_an_order_changed_on_one_rank_of_one_transport_is_found_there(
    ranks: Callable[..., list[Any]], tiny_model: Path
) -> None:
    reports = ranks(2, check_on_a_rank, str(tiny_model), 1, False, "collective", ())
    for report in reports:
        (axis,) = report.axes
        assert axis.deployments["collective tp 1"] > 0
        assert (axis.deployments["symmetric tp 2"], axis.deployments["EP 1"]) == (0, 0)
        assert report.exit_code is CheckExit.DIFFERENT


def test_an_order_changed_on_one_rank_of_the_own_transport_is_found_by_all_others(
    ranks: Callable[..., list[Any]], tiny_model: Path
) -> None:
    """Deterministic and the same in every batch, so no axis on one deployment could see it."""
    report = ranks(2, check_on_a_rank, str(tiny_model), 1, False, "symmetric", ())[0]
    assert report.axes[0].deployments["collective tp 1"] > 0
    assert report.axes[0].deployments["EP 1"] > 0


def test_a_tp_size_that_the_device_refuses_is_told(ranks: Callable[..., list[Any]], tiny_model: Path) -> None:
    report = ranks(2, check_on_a_rank, str(tiny_model), 1, False, "", (2,))[0]
    text = "equal on collective tp 1, EP 1; symmetric tp 2 not run: tp (2) is not implemented on the GPU yet"
    assert report.axes[0].finding.startswith(text)
    assert report.exit_code is CheckExit.EQUAL
