"""The dispatcher over real ranks: the same fp32 accumulators as one process that knows everything."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from moe_runtime.comm.collective import CollectiveDispatcher
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.transports import DispatcherName, open_transport
from moe_runtime.eplb.placement import ExpertPlacement
from moe_runtime.kernels.combine import combine_slots_fp32
from moe_runtime.kernels.gemm import pack_weight
from moe_runtime.kernels.grouped_gemm import PackedExpert, expert_mlp, expert_rows
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.placements import contiguous_placement
from tests.ranks import RankContext

HIDDEN, WIDTH = 24, 16
WORLD_SIZES = [1, 2, 3, 4, 8]


@dataclass(frozen=True)
class Case:
    """One step: who has how many tokens, where the experts are, and how tokens are routed."""

    tokens_per_rank: tuple[int, ...]
    kind: str = "normal"
    dtype: torch.dtype = torch.float32
    num_experts: int = 8
    num_topk: int = 4
    order: tuple[int, ...] | None = None
    routing: str = "random"  # or masked, one_expert
    seed: int = 0

    @property
    def placement(self) -> ExpertPlacement:
        return contiguous_placement(self.num_experts, len(self.tokens_per_rank), self.order)

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden rows, logical experts and weights of all ranks' tokens, the same on every rank."""
        generator = torch.Generator().manual_seed(self.seed)
        num_tokens = sum(self.tokens_per_rank)
        x = hostile(self.kind, (num_tokens, HIDDEN), seed=self.seed).to(self.dtype)
        ids = torch.rand(num_tokens, self.num_experts, generator=generator).argsort(1)[:, : self.num_topk]
        if self.routing == "masked":
            ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.4, -1, ids)
        elif self.routing == "one_expert":
            ids = torch.full_like(ids, -1)
            ids[:, 1] = self.num_experts - 1
        return x, ids, torch.rand(num_tokens, self.num_topk, generator=generator)

    def expert(self, logical: int) -> PackedExpert:
        """Experts 2i and 2i + 1 nearly cancel, so the order of a token's slots shows."""
        generator = torch.Generator().manual_seed(logical // 2)
        gate_up = torch.randn(2 * WIDTH, HIDDEN, generator=generator) / 5
        down = torch.randn(HIDDEN, WIDTH, generator=generator) * 64
        down = (down if logical % 2 else -down) + logical / 16
        return PackedExpert(
            gate_up=pack_weight(gate_up.to(self.dtype), 1), down=pack_weight(down.to(self.dtype), 1)
        )


def run_cases(
    context: RankContext, cases: list[Case], transport: DispatcherName = "collective"
) -> list[tuple[torch.Tensor, int]]:
    """This rank's accumulators and number of computed rows, per case."""
    rank = context.rank
    group = open_transport(context.group, transport).group
    results = []
    for case in cases:
        placement = case.placement
        experts = [case.expert(logical) for logical in placement.local_logical_experts(rank)]
        mine = slice(sum(case.tokens_per_rank[:rank]), sum(case.tokens_per_rank[: rank + 1]))
        x, ids, weights = (t[mine] for t in case.tokens())
        to_physical = torch.from_numpy(placement.logical_to_physical)
        physical = torch.where(ids >= 0, to_physical[ids.clamp(min=0)], -1)
        dispatcher = CollectiveDispatcher(group, placement.first_expert, case.num_topk)
        received = dispatcher.dispatch(x, physical, weights, case.tokens_per_rank)
        pairs = received.pairs
        rows = expert_rows(received.x_ep_local, pairs.row, pairs.local_expert, received.weights, experts)
        home = dispatcher.combine(rows, received)
        assert home.shape == (x.shape[0], case.num_topk, HIDDEN)
        assert home.dtype == case.dtype
        results.append((combine_slots_fp32(home), rows.shape[0]))
    return results


def oracle_rows(case: Case) -> torch.Tensor:
    """``[tokens, K, hidden]``: each (token, slot) row computed by itself in this process."""
    x, ids, weights = case.tokens()
    rows = torch.zeros(*ids.shape, HIDDEN, dtype=case.dtype)
    experts = [case.expert(logical) for logical in range(case.num_experts)]
    for token, slot in torch.nonzero(ids >= 0).tolist():
        out = expert_mlp(x[token : token + 1], experts[int(ids[token, slot])])
        rows[token, slot] = (weights[token, slot] * out[0].float()).to(case.dtype)
    return rows


def check(ranks, world_size: int, cases: list[Case], transport: DispatcherName = "collective") -> None:
    results = ranks(world_size, run_cases, cases, transport)
    for i, case in enumerate(cases):
        actual = torch.cat([results[rank][i][0] for rank in range(world_size)])
        assert_bits_equal(actual, combine_slots_fp32(oracle_rows(case)), f"{case}")
        num_rows = sum(results[rank][i][1] for rank in range(world_size))
        assert num_rows == int((case.tokens()[1] >= 0).sum()), "padding rows are never computed"


def spread(world_size: int, *counts: int) -> tuple[int, ...]:
    return tuple(counts[rank % len(counts)] for rank in range(world_size))


@pytest.mark.parametrize("transport", ["collective", "symmetric"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_accumulators_are_those_of_one_process(ranks, world_size, transport):
    some = spread(world_size, 3, 0, 7, 1)
    even = spread(world_size, 5)
    last = (0,) * (world_size - 1) + (9,)
    shuffled = tuple(torch.randperm(8, generator=torch.Generator().manual_seed(1)).tolist())
    cases = [
        *(Case(some, kind, dtype) for kind in HOSTILE_KINDS for dtype in (torch.float32, torch.bfloat16)),
        *(Case(even, kind, order=shuffled) for kind in HOSTILE_KINDS),
        Case(even, order=tuple(reversed(range(8))), dtype=torch.bfloat16),
        Case(last, "cancelling"),
        Case((0,) * world_size),
        Case(some, "cancelling", routing="masked"),
        Case(even, routing="one_expert"),
        Case(last, routing="one_expert", dtype=torch.bfloat16),
        Case(some, "cancelling", num_experts=5),  # divides by none of the world sizes above one
        Case(some, "cancelling", num_experts=2, num_topk=2),  # some ranks have no expert
        Case(even, num_experts=1, num_topk=1),
        Case(some, "heavy_tailed", num_experts=17, num_topk=8),
        Case(some, num_experts=60, num_topk=8),
    ]
    check(ranks, world_size, cases, transport)


def test_control_other_orders_of_addition_show_on_eight_ranks(ranks):
    case = Case(spread(8, 3, 0, 7, 1), "cancelling", seed=3)
    check(ranks, 8, [case])
    rows, (_, ids, _) = oracle_rows(case).float(), case.tokens()
    ours = combine_slots_fp32(rows)
    # One expert on each rank: ranks that answer in their order bring the slots by ascending expert.
    by_rank = rows.gather(1, ids.argsort(1)[..., None].expand_as(rows))
    assert not torch.equal(combine_slots_fp32(by_rank), ours), "rows added as their ranks answer"
    presummed = torch.zeros_like(ours)
    for rank in range(2):  # two ranks of four experts each, which add their own rows before they send
        presummed = presummed + torch.where((ids // 4 == rank)[..., None], rows, 0.0).sum(1)
    assert not torch.equal(presummed, ours), "partial sums per rank"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_token_that_is_not_finite_changes_no_other_token(ranks, world_size, bad):
    clean = Case(spread(world_size, 4, 2), seed=5)
    results = ranks(world_size, run_with_a_bad_token, clean, bad)
    actual = torch.cat(results)
    assert_bits_equal(actual[1:], combine_slots_fp32(oracle_rows(clean))[1:])
    assert not actual[0].isfinite().any()


def run_with_a_bad_token(context: RankContext, case: Case, bad: float) -> torch.Tensor:
    real = Case.tokens

    def spoilt(self):
        x, ids, weights = real(self)
        x[0] = bad
        return x, ids, weights

    Case.tokens = spoilt
    try:
        return run_cases(context, [case])[0][0]
    finally:
        Case.tokens = real


def test_prefix_sums_that_do_not_fit_the_group_are_refused():
    with pytest.raises(ValueError, match="ep_size \\+ 1 = 2"):
        CollectiveDispatcher(RankGroup(), [0, 2, 4], 2)
