"""Virtual ranks: the accumulators of real ones and of one process, whatever their number."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.loopback import LoopbackDispatcher
from moe_runtime.comm.transports import open_transport
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.kernels.combine import combine_slots_fp32
from moe_runtime.kernels.grouped_gemm import expert_rows
from tests.bits import HOSTILE_KINDS, assert_bits_equal
from tests.checkpoints import tiny_config, write_checkpoint
from tests.comm.test_collective import Case, oracle_rows
from tests.placements import contiguous_placement

NUM_RANKS = [1, 2, 4, 8, 16]
CASES = [
    *(Case((13,), kind, dtype) for kind in HOSTILE_KINDS for dtype in (torch.float32, torch.bfloat16)),
    Case((0,)),
    Case((1,), "cancelling"),
    Case((300,), "cancelling", num_experts=17, num_topk=8),
    Case((13,), "cancelling", routing="masked"),
    Case((13,), routing="one_expert"),
    Case((5,), num_experts=1, num_topk=1),
]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_accumulators_are_those_of_one_process(num_ranks):
    for case in CASES:
        placement = contiguous_placement(case.num_experts, num_ranks)
        x, ids, weights = case.tokens()
        dispatcher = LoopbackDispatcher(placement.first_expert, case.num_topk)
        received = dispatcher.dispatch(x, ids, weights, [len(x)])
        pairs = received.pairs
        experts = [case.expert(logical) for logical in range(case.num_experts)]
        rows = expert_rows(received.x_ep_local, pairs.row, pairs.local_expert, received.weights, experts)
        assert len(rows) == int((ids >= 0).sum()), "padding rows are never computed"
        actual = combine_slots_fp32(dispatcher.combine(rows, received))
        assert_bits_equal(actual, combine_slots_fp32(oracle_rows(case)), f"{num_ranks} ranks, {case}")


def test_control_rows_added_in_the_order_of_their_ranks_show():
    case = Case((13,), "cancelling", seed=3)
    rows, (_, ids, _) = oracle_rows(case).float(), case.tokens()
    by_rank = rows.gather(1, ids.argsort(1)[..., None].expand_as(rows))  # 8 experts on 8 virtual ranks
    assert not torch.equal(combine_slots_fp32(by_rank), combine_slots_fp32(rows))


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
def test_a_model_gives_the_same_bits_with_any_number_of_virtual_ranks(kind, tmp_path):
    folder = write_checkpoint(tmp_path, tiny_config("qwen3_moe"), kind=kind)
    prompts = [list(range(3, 3 + length)) for length in (1, 7, 70)]
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, seed=0, ignore_eos=True)

    def run(**options):
        return LLM(str(folder), device="cpu", **options).generate(prompts, params)

    alone = run()
    for num_ranks in (2, 3, 16):
        assert run(dispatcher="loopback", loopback_ranks=num_ranks) == alone


def test_it_is_for_one_process_and_at_least_one_virtual_rank():
    assert open_transport(RankGroup(), "loopback").name == "loopback"
    with pytest.raises(ValueError, match=r"dispatcher \(loopback\) must be another with 2 ranks"):
        open_transport(RankGroup(rank=0, size=2), "loopback")
    with pytest.raises(ValueError, match=r"loopback_ranks \(0\) must be at least 1"):
        EngineConfig(loopback_ranks=0)
