"""Windows of attention and the pairs that prompts make in them."""

from __future__ import annotations

import pytest

from moe_runtime.planner.attention_windows import causal_pairs, kinds_of_windows
from moe_runtime.planner.shape_configs import load_shape


@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize(("num_tokens", "num_keys"), [(1, 1), (1, 9), (4, 4), (5, 12), (12, 12)])
def test_pairs_are_those_counted_one_by_one(num_tokens, num_keys, window):
    seen = range(num_keys - num_tokens + 1, num_keys + 1)
    assert causal_pairs(num_tokens, num_keys, window) == sum(min(n, window or n) for n in seen)


def test_layers_without_windows_are_of_one_kind():
    assert kinds_of_windows(load_shape("builtin")) == [(None, 4)]
