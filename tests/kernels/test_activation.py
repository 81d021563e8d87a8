"""SwiGLU: elementwise, whatever the place in the row and the number of rows."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.kernels.activation import swiglu, swiglu_reference
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}  # relative to each value
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_agrees_with_the_reference(dtype, kind):
    gate_up = hostile(kind, (17, 2 * 45), seed=1).to(dtype)
    expected = swiglu_reference(gate_up)
    # Below fp32's smallest normal value the relative error is not bounded.
    error = (swiglu(gate_up).double() - expected).abs()
    assert (error <= TOLERANCE[dtype] * expected.abs() + 1e-30).all()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 8, 17, 45, 64])
def test_an_element_has_the_same_bits_at_every_place(width, dtype, kind):
    gate, up = (hostile(kind, (40, width), seed=seed).to(dtype) for seed in (2, 3))
    whole = swiglu(torch.cat([gate, up], 1))
    for num_rows in (1, 2, 3, 15, 17, 33):
        part = swiglu(torch.cat([gate[-num_rows:], up[-num_rows:]], 1))
        assert_bits_equal(part, whole[-num_rows:], f"last {num_rows} rows")
    for column in range(width):
        one = swiglu(torch.stack([gate[:, column], up[:, column]], 1))
        assert_bits_equal(one, whole[:, column : column + 1], f"column {column}")


def test_very_negative_and_very_positive_gates_stay_finite():
    gate = torch.tensor([[-1e30, -100.0, 0.0, 100.0, 1e30]])
    out = swiglu(torch.cat([gate, torch.ones(1, 5)], 1))
    assert out.isfinite().all()
    assert out[0, 2:].tolist() == [0.0, 100.0, pytest.approx(1e30)]


def test_not_a_number_in_another_row_changes_nothing():
    gate_up = hostile("normal", (9, 40), seed=4)
    clean = swiglu(gate_up)
    gate_up[4] = torch.nan
    assert_bits_equal(swiglu(gate_up)[[0, 3, 5, 8]], clean[[0, 3, 5, 8]])


def test_zero_rows():
    assert swiglu(torch.empty(0, 20)).shape == (0, 10)


def test_control_pieces_of_a_row_show_the_tail_of_the_library_s_silu():
    # Why exp and division are written out: on some machines silu's tail has other bits than its body.
    x = hostile("normal", (1, 1031), seed=5)
    library = torch.nn.functional.silu(x)
    pieces = torch.cat([torch.nn.functional.silu(piece.clone()) for piece in x.split(3, 1)], 1)
    if torch.equal(library, pieces):
        pytest.skip("silu is position invariant on this machine")
    ones = torch.ones_like(x)
    ours = swiglu(torch.cat([x, ones], 1))
    by_piece = [swiglu(torch.cat([p, torch.ones_like(p)], 1)) for p in x.split(3, 1)]
    assert_bits_equal(torch.cat(by_piece, 1), ours)
