"""How ranks come to one outcome before anything is served; serving itself is in tests/e2e/test_serve.py."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

import pytest
import torch

from moe_runtime.errors import CapacityError, CheckpointError
from moe_runtime.exit_codes import EXIT_NO_FIT, EXIT_USAGE
from moe_runtime.launch import serve
from tests.ranks import RankContext


def start(context: RankContext, args: list[list[str]], case: str) -> tuple[int, str, str, list[Any]]:
    """Exit code, messages, log and the transports planned for, of one rank that never gets as far as a front end."""
    shown, log, planned = io.StringIO(), io.StringIO(), []
    plan_model = serve.plan_model

    def plan(config: Any, group: Any) -> Any:
        if case == "fault" and context.rank == 1:
            raise CheckpointError("model.safetensors is missing")
        return plan_model(config, group)

    def plan_deployment(plan: Any, config: Any, group: Any, transport: str) -> None:
        """As on GPUs: a collective."""
        group.all_gather(torch.zeros(3))
        planned.append(transport)
        raise CapacityError("rank 1: the GPU has 1.0 GiB free")

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(shown):
        handler = logging.StreamHandler(log)
        serve.logger.addHandler(handler)
        patch.setattr(serve, "init_ranks", lambda device: context.group)
        patch.setattr(serve, "setup_logging", lambda rank, log_format: None)
        patch.setattr(serve, "close_ranks", lambda group, tensor_parallel=None: None)
        patch.setattr(serve, "plan_model", plan)
        patch.setattr(serve, "plan_deployment", plan_deployment)
        try:
            code = serve.main(["--device", "cpu", "--port", "0", *args[context.rank]])
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            serve.logger.removeHandler(handler)
    return code, shown.getvalue(), log.getvalue(), planned


def test_a_fault_of_one_rank_s_plan_ends_all_ranks_with_one_message(ranks):
    first, second = ranks(2, start, [[], []], "fault")
    assert first[:2] == (EXIT_USAGE, "")
    assert second[:2] == (EXIT_USAGE, "[rank 1] error: model.safetensors is missing\n")
    assert first[3] == second[3] == []


@pytest.mark.parametrize("other", [["--max-num-seqs", "9"], ["--kv-cache-blocks", "7"], ["--tp", "2"]])
def test_other_flags_are_told_before_they_can_lead_to_other_collectives(ranks, other):
    first, second = ranks(2, start, [[], other], "")
    assert first[:2] == second[:2] == (EXIT_USAGE, "")
    assert first[2] == ""
    assert "rank 1 was started with other flags or another checkpoint than rank 0" in second[2]
    assert first[3] == second[3] == []


@pytest.mark.parametrize(
    ("flags", "transport"), [([], "symmetric"), (["--dispatcher", "collective"], "collective")]
)
def test_room_is_planned_for_the_transport_that_was_opened(ranks, flags, transport):
    outcomes = ranks(2, start, [flags, flags], "")
    assert [(code, planned) for code, _, _, planned in outcomes] == [(EXIT_NO_FIT, [transport])] * 2
    message = "error: the model does not fit: rank 1: the GPU has 1.0 GiB free\n"
    assert [shown for _, shown, _, _ in outcomes] == [message, ""]


def test_a_transport_that_cannot_be_ends_with_the_code_of_usage(ranks):
    flags = ["--dispatcher", "deepep"]
    (first, shown, _, planned), second = ranks(2, start, [flags, flags], "")
    assert (first, planned) == (EXIT_USAGE, [])
    assert "error: dispatcher (deepep) must be auto, collective, symmetric or loopback" in shown
    assert (second[0], second[1]) == (EXIT_USAGE, "")
