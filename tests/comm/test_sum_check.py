"""The proof of a transport's sum: the tree passes, every other way to add is refused."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm.sum_check import SumCase, partial_sums, refuse_faults, sum_case, sum_fault
from moe_runtime.errors import InvarianceError
from moe_runtime.kernels.combine import combine_slots
from tests.bits import assert_bits_equal

FIRST_EXPERT = (0, 5, 8, 8, 16)
HIDDEN, NUM_TOPK = 32, 4


def fault_of(transport, rank=0, **options):
    settings = {"first_expert": FIRST_EXPERT, "num_topk": NUM_TOPK, "hidden": HIDDEN}
    settings |= {"num_max_tokens_per_rank": 32} | options
    return sum_fault(lambda case: transport(case)[case.tokens_of(rank)], rank=rank, **settings)


def ascending(case: SumCase) -> torch.Tensor:
    """fp32 from zero, valid slots only: not the way combine_slots is written."""
    total = torch.zeros(case.rows.shape[0], HIDDEN)
    for slot in range(case.topk_idx.shape[1]):
        live = (case.topk_idx[:, slot] >= 0)[:, None]
        total = torch.where(live, total + case.weighted_rows[:, slot].float(), total)
    return total.bfloat16()


def reordered(case: SumCase, order: torch.Tensor) -> torch.Tensor:
    return combine_slots(case.weighted_rows.gather(1, order[..., None].expand_as(case.rows)))


def descending(case: SumCase) -> torch.Tensor:
    return combine_slots(case.weighted_rows.flip(1))


def by_expert(case: SumCase) -> torch.Tensor:
    return reordered(case, case.topk_idx.argsort(1))


def last_two_exchanged(case: SumCase) -> torch.Tensor:
    order = [*range(case.rows.shape[1] - 2), -1, -2]
    return combine_slots(case.weighted_rows[:, order])


def pairwise(case: SumCase) -> torch.Tensor:
    rows = case.weighted_rows.float()
    return ((rows[:, 0] + rows[:, 1]) + (rows[:, 2] + rows[:, 3])).bfloat16()


def rounded_between(case: SumCase) -> torch.Tensor:
    total = case.weighted_rows[:, 0]
    for slot in range(1, case.rows.shape[1]):
        total = total + case.weighted_rows[:, slot]
    return total


def per_rank(case: SumCase) -> torch.Tensor:
    return partial_sums(case.weighted_rows, case.topk_idx, FIRST_EXPERT)


def fp64(case: SumCase) -> torch.Tensor:
    return case.weighted_rows.double().sum(1).bfloat16()


def unweighted(case: SumCase) -> torch.Tensor:
    return combine_slots(case.rows.masked_fill((case.topk_idx < 0)[..., None], 0))


def masked_too(case: SumCase) -> torch.Tensor:
    return combine_slots((case.topk_weights[..., None] * case.rows.float()).bfloat16())


def other_token(case: SumCase) -> torch.Tensor:
    return combine_slots(case.weighted_rows).roll(1, 0)


def not_a_number(case: SumCase) -> torch.Tensor:
    sums = combine_slots(case.weighted_rows)
    sums[:, -1] = torch.nan
    return sums


def wide(case: SumCase) -> torch.Tensor:
    return combine_slots(case.weighted_rows.float())


@pytest.mark.parametrize("rank", range(4))
def test_the_tree_passes_however_it_is_written(rank):
    assert fault_of(ascending, rank) is None
    assert fault_of(lambda case: combine_slots(case.weighted_rows), rank) is None


@pytest.mark.parametrize("num_topk", [1, 2, 3, 8])
def test_it_passes_for_any_number_of_slots(num_topk):
    assert fault_of(ascending, num_topk=num_topk) is None
    if num_topk > 2:  # two slots have one order
        assert fault_of(descending, num_topk=num_topk)


@pytest.mark.parametrize(
    "wrong",
    [
        descending,
        by_expert,
        last_two_exchanged,
        pairwise,
        rounded_between,
        per_rank,
        fp64,
        unweighted,
        masked_too,
        other_token,
        not_a_number,
        wide,
    ],
)
@pytest.mark.parametrize("rank", [0, 3])
def test_control_every_other_sum_is_refused(wrong, rank):
    fault = fault_of(wrong, rank)
    assert fault
    with pytest.raises(InvarianceError, match=r"dispatcher \(deepep\) must add .*rank 2: .*choose another"):
        refuse_faults("deepep", ["", None, fault])


def test_a_message_holds_the_values():
    assert "slots [" in fault_of(descending)
    assert "the tree" in fault_of(descending)
    assert "must be torch.bfloat16" in fault_of(wide)


def test_no_fault_raises_nothing():
    refuse_faults("deepep", ["", None])


def test_pre_summed_rows_have_a_tree_of_their_own():
    assert fault_of(per_rank, presums=True) is None
    for wrong in (ascending, by_expert):
        assert fault_of(wrong, presums=True), "control: the other tree"


def test_partial_sums_by_hand():
    # 4096 + 1 is no bf16: rank 0 rounds it away before 4096 leaves again.
    rows = torch.tensor([4096.0, -4096.0, 1.0, 0.0]).bfloat16().view(1, 4, 1)
    ids = torch.tensor([[0, 2, 1, -1]])
    assert partial_sums(rows, ids, (0, 2, 4)).item() == 0
    assert partial_sums(rows, ids, (0, 1, 2, 4)).item() == 1
    assert partial_sums(rows, ids, (0, 4)).item() == 1


def test_a_case_is_exact_and_has_every_kind_of_token():
    case = sum_case([24, 0, 16], 4, 16, HIDDEN, seed=5)
    assert case.tokens_of(2) == slice(24, 40)
    live = (case.topk_idx >= 0).sum(1)
    assert set(live.tolist()) == {0, 1, 2, 4}
    exact = case.topk_weights[..., None].double() * case.rows.double()
    live_rows = case.topk_idx >= 0
    assert_bits_equal(case.weighted_rows.double()[live_rows], exact[live_rows])
    for ids in case.topk_idx.tolist():
        chosen = [expert for expert in ids if expert >= 0]
        assert len(set(chosen)) == len(chosen)
    zeros = case.rows[::8]
    assert not zeros.any()
    assert zeros.signbit().any()
    assert not zeros.signbit().all()
