"""What may be asked for."""

from __future__ import annotations

import pytest

from moe_runtime.planner.workload import Workload


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_tokens": 0}, r"input_tokens \(0\) must be at least 1"),
        ({"output_tokens": -3}, r"output_tokens \(-3\) must be at least 1"),
        ({"ttft_s": float("nan")}, r"ttft \(nan\) must be finite and positive"),
        ({"tpot_s": -1.0}, r"tpot \(-1.0\) must be finite and positive"),
        ({"request_rate": float("inf")}, r"request_rate \(inf\) must be finite"),
        ({"concurrency": 0}, r"concurrency \(0\) must be at least 1"),
        (
            {"concurrency": 3, "request_rate": 2.0},
            r"request_rate \(2\) and concurrency \(3\) must not both be given",
        ),
    ],
)
def test_a_bad_value_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        Workload(**({"input_tokens": 10, "output_tokens": 5} | change))


def test_a_request_is_prompt_and_answer():
    assert Workload(input_tokens=10, output_tokens=5).num_tokens == 15
