"""The engine behind DeepEP's dispatcher, over a stand-in for deep_ep, in Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.comm.deepep import DeepEPDispatcher, open_buffer, prove_sums
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.transports import Transport
from moe_runtime.engine import llm as llm_module
from moe_runtime.errors import InvarianceError
from tests.comm import fake_deep_ep
from tests.gpu_engine import gpu_llm
from tests.moe_runtime.layers.test_spread_experts import HOMES, LIMITS, expected, folder, outputs
from tests.ranks import RankContext

from moe_runtime.engine import gpu_experts  # isort: skip
from moe_runtime.layers import dispatched_experts  # isort: skip
from moe_runtime.layers.dispatched_experts import DispatchedExperts  # isort: skip

__all__ = ["expected", "folder"]


def open_stand_in(
    group: RankGroup, device_group: Any, first_expert: list[int], **options: Any
) -> DeepEPDispatcher:
    """``open_deepep`` without a GPU and with the stand-in."""
    sizes = {name: options[name] for name in ("num_max_tokens_per_rank", "hidden", "num_topk")}
    most, reduction = options["num_max_tokens_per_rank"], options["reduction"]
    module = SimpleNamespace(ElasticBuffer=fake_deep_ep.ElasticBuffer)
    buffer = open_buffer(module, group.process_group, sizes, allow_multiple_reduction=reduction.enabled)
    dispatcher = DeepEPDispatcher(buffer, group.rank, first_expert, most, presums=reduction.enabled)
    prove_sums(
        dispatcher, group, first_expert, options["num_topk"], options["hidden"], most, torch.device("cpu")
    )
    return dispatcher


def deepep_llm(context: RankContext, folder: str, **options: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm_module, "open_transport", lambda group, *_: Transport("deepep", "asked for", group))
        patch.setattr(gpu_experts, "open_deepep", open_stand_in)
        llm = gpu_llm(Path(folder), group=context.group, dispatcher="deepep", **LIMITS, **options)
    assert isinstance(llm.model.decoder.experts, DispatchedExperts)
    return llm


def run_deepep(context: RankContext, folder: str, all_homes: list[list[int] | None], options: dict[str, Any]):
    llm = deepep_llm(context, folder, **options)
    return [outputs(llm, ranks=homes) for homes in all_homes]


def test_ranks_behind_deepep_have_the_bits_of_one(ranks, folder, expected):
    for spread, crowded in ranks(3, run_deepep, str(folder), HOMES, {}):
        assert spread == expected
        assert crowded == expected


def test_with_attention_shared_too(ranks, folder, expected):
    for found in ranks(2, run_deepep, str(folder), [None], {"tp": 2}):
        assert found == [expected]


def run_sorted(context: RankContext, folder: str):
    """Every pair through the kernels of large steps, in slices of a few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatched_experts, "MAX_CAPACITY", 0)
        patch.setattr(DispatchedExperts, "max_pairs", 5)
        return outputs(deepep_llm(context, folder))


def test_slices_and_sorted_rows_have_the_bits_of_slot_tables(ranks, folder, expected):
    for found in ranks(2, run_sorted, str(folder)):
        assert found == expected


def run_control(context: RankContext, folder: str, proves: bool):
    """With DeepEP's own default, which rounds between ranks."""

    class Rounding(fake_deep_ep.ElasticBuffer):
        def __init__(
            self,
            group: Any,
            num_max_tokens_per_rank: int,
            hidden: int,
            allow_hybrid_mode: bool,
            allow_multiple_reduction: bool,
        ) -> None:
            super().__init__(group, num_max_tokens_per_rank, hidden, allow_hybrid_mode, True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_deep_ep, "ElasticBuffer", Rounding)
        if not proves:
            patch.setattr(sys.modules[__name__], "prove_sums", lambda *_: None)
        try:
            return outputs(deepep_llm(context, folder))
        except InvarianceError as error:
            return str(error)


def test_control_a_dispatcher_that_rounds_between_ranks_differs(ranks, folder, expected):
    for found in ranks(2, run_control, str(folder), False):
        assert isinstance(found, list)
        assert found != expected


def test_such_a_dispatcher_is_refused_before_the_first_request(ranks, folder):
    for found in ranks(2, run_control, str(folder), True):
        assert isinstance(found, str)
        assert found.startswith("dispatcher (deepep) must add each token's rows as kernels/combine.py does")


def run_presummed(context: RankContext, folder: str):
    options = {"invariance": "batch"}
    ours = gpu_llm(Path(folder), group=context.group, dispatcher="collective", **options, **LIMITS)
    return outputs(ours), outputs(deepep_llm(context, folder, **options))


def test_rows_added_before_they_travel_are_those_of_our_transports(ranks, folder, expected):
    for ours, deepep in ranks(2, run_presummed, str(folder)):
        assert deepep == ours
        assert deepep != expected, "level batch rounds between ranks"
