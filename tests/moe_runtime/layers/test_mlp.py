"""Dense and mixture-of-experts MLPs: value against fp64, bits against any company."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.comm.collective import CollectiveDispatcher
from moe_runtime.comm.groups import RankGroup
from moe_runtime.kernels.grouped_gemm import expert_mlp_reference
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.kernels.router import route_reference
from moe_runtime.kernels.schedules import Control, control
from moe_runtime.layers.mlp import DenseMLP, MoE, pack_expert
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile

# Relative to the largest output.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
HIDDEN, WIDTH, NUM_EXPERTS, NUM_TOPK = 40, 24, 7, 3
DTYPES = [torch.float32, torch.bfloat16]


def weights(dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    return [(torch.randn(shape, generator=generator) / 6).to(dtype) for shape in shapes]


def dense(dtype: torch.dtype) -> DenseMLP:
    gate, up, down = weights(dtype)
    return DenseMLP({"gate_proj": gate, "up_proj": up, "down_proj": down}.__getitem__, dtype)


def moe(dtype: torch.dtype, *, norm: bool = True, order: list[int] | None = None) -> MoE:
    order = order or list(range(NUM_EXPERTS))
    router = torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(99)).to(dtype)
    to_physical = torch.empty(NUM_EXPERTS, dtype=torch.int64)
    to_physical[torch.tensor(order)] = torch.arange(NUM_EXPERTS)
    return MoE(
        router=router,
        experts=[pack_expert(*weights(dtype, expert + 1)) for expert in order],
        replicas=Replicas(
            table=to_physical[:, None].int(), count=torch.ones(NUM_EXPERTS, dtype=torch.int32), layer_idx=0
        ),
        dispatcher=CollectiveDispatcher(RankGroup(), [0, NUM_EXPERTS], NUM_TOPK),
        num_topk=NUM_TOPK,
        norm_topk_prob=norm,
    )


def run(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    return layer(x, [x.shape[0]])[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dense_mlp_agrees_with_the_reference(dtype):
    x = hostile("normal", (33, HIDDEN), seed=1).to(dtype)
    expected = expert_mlp_reference(x, *weights(dtype))
    actual = dense(dtype)(x)
    assert actual.dtype == dtype
    assert (actual.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mixture_agrees_with_the_reference(dtype, norm):
    layer = moe(dtype, norm=norm)
    x = hostile("normal", (33, HIDDEN), seed=2).to(dtype)
    router = torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(99)).to(dtype)
    ids, routing_weights = route_reference(x.double() @ router.double().T, NUM_TOPK, norm)
    expected = torch.zeros(33, HIDDEN, dtype=torch.float64)
    for token in range(33):
        for expert, weight in zip(ids[token].tolist(), routing_weights[token].tolist(), strict=True):
            row = expert_mlp_reference(x[token : token + 1], *weights(dtype, expert + 1))
            expected[token] += weight * row[0]
    actual, chosen = layer(x, [33])
    assert torch.equal(chosen, ids)
    assert (actual.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("kind", HOSTILE_KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_every_batch(dtype, kind):
    x = hostile(kind, (257, HIDDEN), seed=3).to(dtype)
    sparse, plain = moe(dtype), dense(dtype)
    whole, whole_plain = run(sparse, x), plain(x)
    for num_tokens in (1, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255):
        for part in (slice(0, num_tokens), slice(257 - num_tokens, 257)):
            assert_bits_equal(run(sparse, x[part]), whole[part], f"mixture, {part}")
            assert_bits_equal(plain(x[part]), whole_plain[part], f"dense, {part}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_experts_stand_changes_nothing(dtype):
    x = hostile("heavy_tailed", (50, HIDDEN), seed=4).to(dtype)
    expected, chosen = moe(dtype)(x, [50])
    for order in ([6, 5, 4, 3, 2, 1, 0], [3, 0, 6, 1, 5, 2, 4]):
        actual, ids = moe(dtype, order=order)(x, [50])
        assert_bits_equal(actual, expected)
        assert torch.equal(ids, chosen), "chosen experts are logical ids"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_changes_no_other(bad):
    layer, plain = moe(torch.float32), dense(torch.float32)
    x = hostile("normal", (20, HIDDEN), seed=5)
    clean, clean_plain = run(layer, x), plain(x)
    x[7] = bad
    others = torch.arange(20) != 7
    assert_bits_equal(run(layer, x)[others], clean[others])
    assert_bits_equal(plain(x)[others], clean_plain[others])


def test_zero_tokens():
    out, chosen = moe(torch.bfloat16)(torch.empty(0, HIDDEN, dtype=torch.bfloat16), [0])
    assert out.shape == (0, HIDDEN)
    assert chosen.shape == (0, NUM_TOPK)
    assert dense(torch.bfloat16)(torch.empty(0, HIDDEN, dtype=torch.bfloat16)).shape == (0, HIDDEN)


@pytest.mark.parametrize("which", [Control.SPLIT_K_GEMM, Control.ARRIVAL_COMBINE])
def test_control_a_token_changes_with_its_batch(which):
    layer, x = moe(torch.float32), hostile("normal", (65, HIDDEN), seed=6)
    with control(which):
        whole = run(layer, x)
        alone = torch.cat([run(layer, row) for row in x.split(1)])
    assert not torch.equal(whole, alone)
