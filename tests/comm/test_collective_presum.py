"""Pre-summing over real and virtual ranks: the sums of one process that groups each token's slots by rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from moe_runtime.comm.collective import CollectiveDispatcher
from moe_runtime.comm.loopback import LoopbackDispatcher
from moe_runtime.comm.transports import DispatcherName, open_transport
from moe_runtime.eplb.placement import ExpertPlacement
from moe_runtime.kernels.combine import combine_slots
from moe_runtime.kernels.grouped_gemm import expert_rows
from tests.bits import HOSTILE_KINDS, assert_bits_equal
from tests.comm.test_collective import HIDDEN, Case, oracle_rows, spread
from tests.placements import contiguous_placement
from tests.ranks import RankContext

WORLD_SIZES = [1, 2, 3, 4, 8]
DTYPES = [torch.float32, torch.bfloat16]


class CountingLinks:
    """Real links that note the bytes of every row exchange."""

    def __init__(self, links) -> None:
        self.links = links
        self.sent_bytes: list[int] = []

    def exchange(
        self, send: torch.Tensor, send_splits: Sequence[int], recv_splits: Sequence[int]
    ) -> torch.Tensor:
        self.sent_bytes.append(send.numel() * send.element_size())
        return self.links.exchange(send, send_splits, recv_splits)


def to_physical(placement: ExpertPlacement, ids: torch.Tensor) -> torch.Tensor:
    return torch.where(ids >= 0, torch.from_numpy(placement.logical_to_physical)[ids.clamp(min=0)], -1)


def run_cases(
    context: RankContext, cases: list[Case], transport: DispatcherName, presums: bool = True
) -> list[tuple[torch.Tensor, int]]:
    """This rank's sums and the bytes that it sent home, per case."""
    rank = context.rank
    group = open_transport(context.group, transport).group
    links = CountingLinks(group.links)
    if group.links is not None:
        group = replace(group, links=links)
    results = []
    for case in cases:
        placement = case.placement
        experts = [case.expert(logical) for logical in placement.local_logical_experts(rank)]
        mine = slice(sum(case.tokens_per_rank[:rank]), sum(case.tokens_per_rank[: rank + 1]))
        x, ids, weights = (t[mine] for t in case.tokens())
        dispatcher = CollectiveDispatcher(group, placement.first_expert, case.num_topk, presums=presums)
        received = dispatcher.dispatch(x, to_physical(placement, ids), weights, case.tokens_per_rank)
        pairs = received.pairs
        rows = expert_rows(received.x_ep_local, pairs.row, pairs.local_expert, received.weights, experts)
        home = dispatcher.combine_sum(rows, received)
        assert home.shape == (x.shape[0], HIDDEN)
        results.append((home, links.sent_bytes[-1] if links.sent_bytes else 0))
    return results


def run_loopback(case: Case, placement: ExpertPlacement) -> torch.Tensor:
    """All tokens in one process that plays the ranks of ``placement``."""
    x, ids, weights = case.tokens()
    dispatcher = LoopbackDispatcher(placement.first_expert, case.num_topk, presums=True)
    received = dispatcher.dispatch(x, to_physical(placement, ids), weights, [len(x)])
    pairs = received.pairs
    experts = [case.expert(int(logical)) for logical in placement.physical_to_logical_map]
    rows = expert_rows(received.x_ep_local, pairs.row, pairs.local_expert, received.weights, experts)
    return dispatcher.combine_sum(rows, received)


def oracle(case: Case, placement: ExpertPlacement) -> torch.Tensor:
    """``[tokens, hidden]``: one token after another, ranks and slots ascending, each sum from its first term."""
    rows, (_, ids, _) = oracle_rows(case), case.tokens()
    result = torch.zeros(len(ids), HIDDEN, dtype=case.dtype)
    for token, chosen in enumerate(ids.tolist()):
        total = None
        for rank in range(placement.ep_size):
            local = placement.local_logical_experts(rank)
            held = [rows[token, slot].float() for slot, expert in enumerate(chosen) if expert in local]
            if held:
                part = sum(held[1:], held[0]).to(case.dtype).float()
                total = part if total is None else total + part
        if total is not None:
            result[token] = total.to(case.dtype)
    return result


def cases_for(world_size: int) -> list[Case]:
    some, last = spread(world_size, 3, 0, 7, 1), (0,) * (world_size - 1) + (9,)
    shuffled = tuple(torch.randperm(8, generator=torch.Generator().manual_seed(1)).tolist())
    return [
        *(Case(some, kind, dtype) for kind in HOSTILE_KINDS for dtype in DTYPES),
        Case(spread(world_size, 5), "cancelling", order=shuffled),
        Case(last, "cancelling", torch.bfloat16),
        Case((0,) * world_size),
        Case(some, "cancelling", routing="masked"),
        Case(last, routing="one_expert", dtype=torch.bfloat16),
        Case(some, "cancelling", num_experts=5),
        Case(some, "cancelling", num_experts=2, num_topk=2),  # some ranks have no expert
        Case(some, "heavy_tailed", num_experts=17, num_topk=8),
    ]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sums_are_those_of_one_process_by_every_transport(ranks, world_size):
    cases = cases_for(world_size)
    expected = [oracle(case, case.placement) for case in cases]
    for transport in ("collective", "symmetric"):
        results = ranks(world_size, run_cases, cases, transport)
        for i, case in enumerate(cases):
            actual = torch.cat([results[rank][i][0] for rank in range(world_size)])
            assert_bits_equal(actual, expected[i], f"{transport}, {case}")
    for case, wanted in zip(cases, expected, strict=True):
        assert_bits_equal(run_loopback(case, case.placement), wanted, f"loopback, {case}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_ranks_shows_and_only_where_they_pre_sum(ranks, dtype):
    case = Case((3, 1, 2, 5), "cancelling", dtype, seed=3)
    two = replace(case, tokens_per_rank=(4, 7))

    def sums(case: Case, presums: bool) -> torch.Tensor:
        results = ranks(len(case.tokens_per_rank), run_cases, [case], "collective", presums)
        return torch.cat([found[0][0] for found in results])

    assert not torch.equal(sums(case, True), sums(two, True))
    assert not torch.equal(sums(case, True), combine_slots(oracle_rows(case)))
    # The control: the same rows without pre-summing.
    assert_bits_equal(sums(case, False), sums(two, False))
    assert_bits_equal(sums(case, False), combine_slots(oracle_rows(case)))


def test_one_virtual_rank_has_one_group():
    for case in cases_for(1):
        if case.routing != "masked":  # a masked slot is a zero row there and no term here
            one = contiguous_placement(case.num_experts, 1, case.order)
            assert_bits_equal(run_loopback(case, one), combine_slots(oracle_rows(case)), f"{case}")


def test_where_a_rank_adds_its_slots_in_another_order_it_shows():
    case = Case((13,), "cancelling", seed=3)
    placement = contiguous_placement(8, 2)
    backwards = oracle_rows(case).flip(1)
    in_order = run_loopback(case, placement)
    turned = torch.zeros_like(in_order)
    ids = case.tokens()[1].flip(1)
    for rank in range(2):
        held = ids // 4 == rank
        part = torch.zeros_like(turned)
        for slot in range(case.num_topk):
            part = torch.where(held[:, slot, None], part + backwards[:, slot], part)
        turned = turned + part
    assert not torch.equal(turned, in_order)


def test_one_row_per_token_and_rank_travels_home(ranks):
    case = Case((6, 0, 2, 3), num_experts=16, num_topk=4)  # four experts on each rank
    partial = ranks(4, run_cases, [case], "symmetric", True)
    unreduced = ranks(4, run_cases, [case], "symmetric", False)
    for (_, sent_bytes), (_, sent_unreduced_bytes) in zip(
        (found[0] for found in partial), (found[0] for found in unreduced), strict=True
    ):
        assert sent_bytes == sum(case.tokens_per_rank) * HIDDEN * 4
        assert sent_unreduced_bytes == 4 * sent_bytes


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_changes_no_other_token(bad):
    class Spoilt(Case):
        def tokens(self):
            x, ids, weights = Case.tokens(self)
            x[0] = bad
            return x, ids, weights

    placement = contiguous_placement(8, 3)
    actual = run_loopback(Spoilt((9,), "cancelling"), placement)
    assert_bits_equal(actual[1:], oracle(Case((9,), "cancelling"), placement)[1:])
    assert not actual[0].isfinite().any()
