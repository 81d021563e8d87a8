"""Keys that rank experts, groups that are kept, and what sigmoid scores refuse; test_topk_triton.py has them in use."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.triton_interpreter import DEVICE

from moe_runtime.kernels.expert_ranks_triton import (  # isort: skip
    SigmoidScores,
    keep_groups,
    key_value,
    rank_key,
    sigmoid_topk_reference,
)

NAN, INF = float("nan"), float("inf")
LOWEST = -9223372036854775807


@triton.jit
def _keys(x, keys, values, kept, N: tl.constexpr, LOWEST: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    key = rank_key(tl.load(x + i), i)
    tl.store(keys + i, key)
    tl.store(values + i, key_value(key))
    tl.store(kept + i, tl.reshape(keep_groups(tl.reshape(key, (1, N)), LOWEST, 4, 2), (N,)))


def keys_of(values: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.tensor(values, device=DEVICE)
    keys, kept = (torch.zeros(len(values), dtype=torch.int64, device=DEVICE) for _ in range(2))
    again = torch.zeros_like(x)
    _keys[(1,)](x, keys, again, kept, N=len(values), LOWEST=LOWEST)
    return keys.cpu(), again.cpu(), kept.cpu()


def test_keys_order_by_value_then_by_lower_index_with_nan_first():
    values = [1.0, NAN, -INF, 0.0, -0.0, INF, 1e-45, -1e-45, 1.0, 3e38, -3e38, NAN, 2.0, -2.0, 0.5, -0.5]
    keys, again, _ = keys_of(values)
    order = keys.sort(descending=True).indices.tolist()
    assert order == [1, 11, 5, 9, 12, 0, 8, 14, 6, 3, 4, 7, 15, 13, 10, 2]
    assert len(set(keys.tolist())) == len(values)
    finite = [i for i, value in enumerate(values) if value == value]
    assert again[finite].tolist() == torch.tensor(values)[finite].tolist()


def test_groups_are_kept_by_their_two_best_and_the_lower_on_ties():
    values = [5.0, 0, 0, 0, 2.5, 2.5, 0, 0, 3.0, 3.0, 0, 0, 1.0, 4.0, 0, 0]
    kept = keys_of(values)[2].view(4, 4)
    assert (kept != LOWEST).all(1).tolist() == [True, False, True, False]  # 5, 5, 6, 5
    assert (kept[[1, 3]] == LOWEST).all()


def test_the_reference_adds_the_bias_to_the_choice_alone():
    logits, bias = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 0.0, 5.0])
    ids, weights = sigmoid_topk_reference(logits, 2, False, SigmoidScores(bias=bias, scale=2.0))
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, 2 * torch.sigmoid(torch.tensor([[-1.0, 2.0]])))


@pytest.mark.parametrize(
    ("num_experts", "wrong"),
    [
        (16, {"num_groups": 3}),
        (16, {"num_groups": 16}),
        (16, {"num_groups": 4, "num_kept_groups": 5}),
        (16, {"num_groups": 8, "num_kept_groups": 1}),
        (8, {"num_groups": 2}),
        (24, {"num_groups": 2}),
    ],
)
def test_groups_that_do_not_fit_are_refused(num_experts, wrong):
    with pytest.raises(ValueError, match=r"num_\w*groups|num_experts"):
        SigmoidScores(**wrong).check(num_experts, 3)
