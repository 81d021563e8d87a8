"""DeepEP's dispatchers over a stand-in for deep_ep, and over deep_ep itself where it can be imported."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_runtime.comm.collective import CollectiveDispatcher
from moe_runtime.comm.deepep import (
    DeepEPDispatcher,
    LowLatencyDispatcher,
    import_deep_ep,
    open_buffer,
    open_deepep,
    prove_sums,
)
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.loopback import LoopbackDispatcher
from moe_runtime.comm.multiple_reduction import MultipleReduction, resolve_multiple_reduction
from moe_runtime.comm.sum_check import partial_sums
from moe_runtime.engine.llm import LLM
from moe_runtime.errors import InvarianceError
from moe_runtime.kernels.combine import combine_slots, combine_slots_fp32
from moe_runtime.kernels.grouped_gemm import expert_rows
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.kernels.schedules import Control, control
from moe_runtime.layers.mlp import MoE, pack_expert
from tests.bits import HOSTILE_KINDS, assert_bits_equal, hostile
from tests.comm import fake_deep_ep
from tests.comm.test_collective import HIDDEN, WIDTH, Case, oracle_rows, spread
from tests.ranks import RankContext

MOST = 16
GPU_HIDDEN = 2048
WORLD_SIZES = [1, 2, 3, 4]
OFF = MultipleReduction(False, "")


def cases(world_size: int) -> list[Case]:
    some, even = spread(world_size, 3, 0, 7, 1), spread(world_size, 5)
    bf16 = torch.bfloat16
    return [
        *(Case(some, kind, bf16) for kind in HOSTILE_KINDS),
        Case(even, "cancelling", bf16, order=tuple(reversed(range(8)))),
        Case((0,) * world_size, dtype=bf16),
        Case((0,) * (world_size - 1) + (9,), "cancelling", bf16),
        Case(some, "cancelling", bf16, routing="masked"),
        Case(even, dtype=bf16, routing="one_expert"),
        Case(some, "cancelling", bf16, num_experts=5),
        Case(some, "cancelling", bf16, num_experts=2, num_topk=2),  # some ranks have no expert
        Case(even, dtype=bf16, num_experts=1, num_topk=1),
        Case(some, "heavy_tailed", bf16, num_experts=17, num_topk=8),
    ]


def dispatcher_for(context: RankContext, kind: str, first_expert, hidden: int):
    if kind == "low_latency":
        buffer = fake_deep_ep.Buffer(context.process_group)
        return LowLatencyDispatcher(buffer, context.rank, first_expert, MOST)
    name = {"descending": "DescendingBuffer", "pairwise": "PairwiseBuffer"}.get(kind, "ElasticBuffer")
    buffer = open_buffer(
        SimpleNamespace(ElasticBuffer=getattr(fake_deep_ep, name)),
        context.process_group,
        {"num_max_tokens_per_rank": MOST, "hidden": hidden, "num_topk": 4},
        allow_multiple_reduction=kind in ("presums", "default_flag"),
    )
    buffer.spare_rows = 3 if kind == "spare" else 0
    return DeepEPDispatcher(buffer, context.rank, first_expert, MOST, presums=kind == "presums")


def widened(x: torch.Tensor, hidden: int) -> torch.Tensor:
    """The columns over and over: a row as wide as DeepEP takes them."""
    return x.repeat(1, -(-hidden // HIDDEN))[:, :hidden]


def run_case(dispatcher, case: Case, rank: int, hidden: int = HIDDEN, device: str = "cpu") -> torch.Tensor:
    """A rank's sums, or fp32 accumulators where the rows come home by themselves."""
    placement = case.placement
    experts = [case.expert(logical) for logical in placement.local_logical_experts(rank)]
    start = sum(case.tokens_per_rank[:rank])
    mine = slice(start, start + case.tokens_per_rank[rank])
    x, ids, weights = (t[mine] for t in case.tokens())
    physical = to_physical(case, ids).to(device)
    x = widened(x, hidden).to(device)
    received = dispatcher.dispatch(x, physical, weights.to(device), case.tokens_per_rank)
    assert_bits_equal(received.x_ep_local, widened(received.x_ep_local[:, :HIDDEN], hidden), f"{case}, rows")
    pairs, x_ep = received.pairs, received.x_ep_local[:, :HIDDEN].cpu()
    rows = expert_rows(x_ep, pairs.row.cpu(), pairs.local_expert.cpu(), received.weights.cpu(), experts)
    rows = widened(rows, hidden).to(device)
    if isinstance(dispatcher, LowLatencyDispatcher):
        return combine_slots_fp32(dispatcher.combine(rows, received))
    return dispatcher.combine_sum(rows, received).cpu()


def to_physical(case: Case, ids: torch.Tensor) -> torch.Tensor:
    places = torch.from_numpy(case.placement.logical_to_physical)
    return torch.where(ids >= 0, places[ids.clamp(min=0)], -1)


def run_cases(
    context: RankContext, all_cases: list[Case], kind: str, hidden: int = HIDDEN
) -> list[torch.Tensor]:
    """This rank's sums of every case."""
    return [
        run_case(
            dispatcher_for(context, kind, case.placement.first_expert, hidden), case, context.rank, hidden
        )
        for case in all_cases
    ]


def by_loopback(case: Case, *, presums: bool = False) -> torch.Tensor:
    """All ranks' sums, by one process that plays them."""
    x, ids, weights = case.tokens()
    dispatcher = LoopbackDispatcher(case.placement.first_expert, case.num_topk, presums=presums)
    received = dispatcher.dispatch(x, to_physical(case, ids), weights, [x.shape[0]])
    pairs = received.pairs
    experts = [
        case.expert(logical)
        for rank in range(len(case.tokens_per_rank))
        for logical in case.placement.local_logical_experts(rank)
    ]
    rows = expert_rows(received.x_ep_local, pairs.row, pairs.local_expert, received.weights, experts)
    return dispatcher.combine_sum(rows, received)


def conforms(results: list[list[torch.Tensor]], hidden: int, *, presums: bool = False) -> None:
    """Every case of every rank has the bits of loopback."""
    world_size = len(results)
    for i, case in enumerate(cases(world_size)):
        actual = torch.cat([results[rank][i] for rank in range(world_size)])
        assert_bits_equal(actual, widened(by_loopback(case, presums=presums), hidden), f"{case}")


@pytest.mark.parametrize("kind", ["plain", "spare"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sums_are_those_of_one_process(ranks, world_size, kind):
    results = ranks(world_size, run_cases, cases(world_size), kind)
    for i, case in enumerate(cases(world_size)):
        actual = torch.cat([results[rank][i] for rank in range(world_size)])
        assert_bits_equal(actual, combine_slots(oracle_rows(case)), f"{case}")
        assert_bits_equal(actual, by_loopback(case), f"{case}, loopback")


def test_the_suite_for_deep_ep_itself_runs_over_the_stand_in(ranks):
    """At a width that is not that of the cases; the control has the other level's tree."""
    plain = ranks(2, run_cases, cases(2), "plain", 64)
    conforms(plain, 64)
    presummed = ranks(2, run_cases, cases(2), "presums", 64)
    conforms(presummed, 64, presums=True)
    with pytest.raises(AssertionError):
        conforms(presummed, 64)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_low_latency_accumulators_are_those_of_one_process(ranks, world_size):
    results = ranks(world_size, run_cases, cases(world_size), "low_latency")
    for i, case in enumerate(cases(world_size)):
        actual = torch.cat([results[rank][i] for rank in range(world_size)])
        assert_bits_equal(actual, combine_slots_fp32(oracle_rows(case)), f"{case}")


def test_pre_summed_rows_are_the_tree_of_partial_sums(ranks):
    differs = False
    results = ranks(3, run_cases, cases(3), "presums")
    for i, case in enumerate(cases(3)):
        actual = torch.cat([results[rank][i] for rank in range(3)])
        _, ids, _ = case.tokens()
        rows = oracle_rows(case)
        assert_bits_equal(
            actual, partial_sums(rows, to_physical(case, ids), case.placement.first_expert), f"{case}"
        )
        differs |= not torch.equal(actual, combine_slots(rows))
    assert differs, "control: partial sums have other bits than the tree of level topology"


def test_control_the_constructors_default_flag_shows(ranks):
    """Orders of slots are shown by the proof below: sums of an expert's rows in bf16 hide nearly all of them."""
    results = ranks(3, run_cases, cases(3), "default_flag")
    actual = [torch.cat([results[rank][i] for rank in range(3)]) for i in range(len(cases(3)))]
    expected = [combine_slots(oracle_rows(case)) for case in cases(3)]
    assert not all(map(torch.equal, actual, expected))


def prove(context: RankContext, kind: str) -> str:
    """The message of a refusal, or nothing."""
    first_expert = [*[0, 3, 4][: context.world_size], 8]
    dispatcher = dispatcher_for(context, kind, first_expert, 16)
    device = torch.device("cpu")
    try:
        prove_sums(dispatcher, context.group, first_expert, 4, 16, MOST, device)
    except InvarianceError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["plain", "spare", "presums", "low_latency"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_proof_passes(ranks, world_size, kind):
    assert ranks(world_size, prove, kind) == [""] * world_size


@pytest.mark.parametrize("kind", ["descending", "pairwise", "default_flag"])
def test_a_version_that_adds_otherwise_is_refused_by_every_rank(ranks, kind):
    messages = ranks(3, prove, kind)
    assert messages[0].startswith("dispatcher (deepep) must add each token's rows as kernels/combine.py does")
    assert messages == [messages[0]] * 3


@pytest.mark.parametrize("fault", ["psum", "weights", "rows"])
def test_rows_and_weights_in_the_wrong_place_are_refused(fault):
    class Wrong(fake_deep_ep.ElasticBuffer):
        def dispatch(self, x, **arguments):
            recv, ids, weights, handle, event = super().dispatch(x, **arguments)
            psum = handle.psum_num_recv_tokens_per_expert
            if fault == "psum" and len(recv):
                psum[0] += 1 if psum[0] < psum[1] else -1
            elif fault == "weights":
                weights = weights.flip(0)
            elif fault == "rows":
                recv = recv.flip(0)
            return recv, ids, weights, handle, event

    buffer = Wrong(None, MOST, 16, allow_hybrid_mode=False, allow_multiple_reduction=False)
    dispatcher = DeepEPDispatcher(buffer, 0, [0, 8], MOST)
    with pytest.raises(InvarianceError, match=r"rank 0: .* sums differ"):
        prove_sums(dispatcher, RankGroup(), [0, 8], 4, 16, MOST, torch.device("cpu"))


def layer(dispatcher) -> MoE:
    """Every token goes to experts 0 to 3 with equal weights; 0 and 1 give +L and -L, far above 2 and 3."""
    generator = torch.Generator().manual_seed(1)
    experts = []
    for expert in range(8):
        gate, up = (torch.randn(WIDTH, HIDDEN, generator=generator).bfloat16() for _ in range(2))
        down = torch.randn(HIDDEN, WIDTH, generator=generator).bfloat16()
        if expert == 0:
            large = gate, up, down * 2.0**40
        elif expert == 1:
            gate, up, down = large[0], large[1], -large[2]
        experts.append(pack_expert(*(large if expert == 0 else (gate, up, down))))
    return MoE(
        router=torch.zeros(8, HIDDEN, dtype=torch.bfloat16),
        experts=experts,
        replicas=Replicas(
            table=torch.arange(8, dtype=torch.int32)[:, None],
            count=torch.ones(8, dtype=torch.int32),
            layer_idx=0,
        ),
        dispatcher=dispatcher,
        num_topk=4,
        norm_topk_prob=True,
    )


def elastic_dispatcher() -> DeepEPDispatcher:
    buffer = fake_deep_ep.ElasticBuffer(None, MOST, HIDDEN, False, False)
    return DeepEPDispatcher(buffer, 0, [0, 8], MOST)


def low_latency_dispatcher() -> LowLatencyDispatcher:
    return LowLatencyDispatcher(fake_deep_ep.Buffer(None), 0, [0, 8], MOST)


@pytest.mark.parametrize("make", [elastic_dispatcher, low_latency_dispatcher])
def test_a_layer_has_the_bits_of_any_other_transport(make):
    x = hostile("normal", (13, HIDDEN), seed=1).bfloat16()
    ours = layer(CollectiveDispatcher(RankGroup(), [0, 8], 4))(x, [13])[0]
    assert_bits_equal(layer(make())(x, [13])[0], ours)
    with control(Control.ARRIVAL_COMBINE):
        whole = layer(make())(x, [13])[0]
        alone = torch.cat([layer(make())(row, [1])[0] for row in x.split(1)])
    assert not torch.equal(whole, alone), "the control is seen through this transport too"


@pytest.mark.parametrize("make", [elastic_dispatcher, low_latency_dispatcher])
def test_a_step_that_does_not_fit_is_refused(make):
    ids, weights = torch.zeros(17, 4, dtype=torch.int64), torch.ones(17, 4)
    x = torch.zeros(17, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"\(17\) must be at most num_max_tokens_per_rank \(16\)"):
        make().dispatch(x, ids, weights, [17])
    with pytest.raises(ValueError, match=r"dtype \(float32\) must be bfloat16"):
        make().dispatch(x[:1].float(), ids[:1], weights[:1], [1])


def test_low_latency_rows_in_another_format_are_refused():
    class Packed:
        def low_latency_dispatch(self, x, topk_idx, max_tokens, num_experts):
            return (x.to(torch.float8_e4m3fn), None), torch.zeros(8), None, None, None

    dispatcher = LowLatencyDispatcher(Packed(), 0, [0, 8], MOST)
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"must deliver torch\.bfloat16 rows"):
        dispatcher.dispatch(x, torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4), [1])


def test_weights_that_are_not_one_per_row_are_refused():
    class Wide(fake_deep_ep.ElasticBuffer):
        def dispatch(self, x, **arguments):
            recv, ids, weights, handle, event = super().dispatch(x, **arguments)
            return recv, ids, weights[:, None], handle, event

    dispatcher = DeepEPDispatcher(Wide(None, MOST, HIDDEN, False, False), 0, [0, 8], MOST)
    x = torch.zeros(1, HIDDEN, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"must have one of each for every \(token, slot\), here 4"):
        dispatcher.dispatch(x, torch.arange(4)[None], torch.ones(1, 4), [1])


def test_where_it_is_absent_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ValueError, match=r"needs .* deep_ep, which cannot be imported") as error:
        import_deep_ep()
    for word in ("https://github.com/deepseek-ai/DeepEP", "NCCL 2.30.4", "CPU ranks cannot use"):
        assert word in str(error.value)
    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=fake_deep_ep.Buffer))
    with pytest.raises(ValueError, match="has neither ElasticBuffer nor EPBuffer"):
        import_deep_ep()
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    assert import_deep_ep() is fake_deep_ep


@pytest.mark.parametrize("level", ["topology", "batch"])
def test_the_flag_of_the_buffer_is_the_resolved_policy(level):
    reduction = resolve_multiple_reduction(level, 0, 0, ep_size=2, transport_can=True)
    made = open_buffer(
        SimpleNamespace(EPBuffer=fake_deep_ep.ElasticBuffer),  # V2.5's name
        None,
        {"num_max_tokens_per_rank": 2, "hidden": 3, "num_topk": 4},
        allow_multiple_reduction=reduction.enabled,
    )
    assert made.allow_multiple_reduction == (level == "batch")
    assert (made.most, made.hidden) == (2, 3)


def test_a_constructor_that_is_not_known_is_refused():
    def without_flag(group, hidden):
        raise AssertionError("must not be opened")

    def with_more(group, num_bytes, allow_multiple_reduction=True):
        raise AssertionError("must not be opened")

    for constructor, name in ((without_flag, "allow_multiple_reduction"), (with_more, "num_bytes")):
        module = SimpleNamespace(ElasticBuffer=constructor)
        with pytest.raises(ValueError, match=f"cannot be opened with .*: .*{name}"):
            open_buffer(module, None, {"hidden": 3}, allow_multiple_reduction=False)


def test_other_devices_and_dtypes_are_refused():
    sizes = {"hidden": 16, "num_topk": 4, "num_max_tokens_per_rank": MOST, "reduction": OFF}
    for device, dtype, message in (
        ("cpu", torch.bfloat16, r"device \(cpu\) must be cuda"),
        ("cuda", torch.float32, r"dtype \(float32\) must be bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            open_deepep(RankGroup(), None, [0, 8], dtype=dtype, device=torch.device(device), **sizes)


def test_cpu_ranks_refuse_the_flag():
    with pytest.raises(
        ValueError, match=r"dispatcher \(deepep\) must be auto, collective, .* with device cpu"
    ):
        LLM("builtin", device="cpu", dispatcher="deepep")


def run_on_gpus(context: RankContext, all_cases: list[Case]) -> dict[str, list[torch.Tensor]]:
    """DeepEP itself at both levels: opened, proved on hostile data, and the sums of every case."""
    torch.cuda.set_device(context.rank)
    device = torch.device("cuda", context.rank)
    device_group = dist.new_group(list(range(context.world_size)), backend="nccl")
    results: dict[str, list[torch.Tensor]] = {}
    for level in ("topology", "batch"):
        results[level] = []
        for case in all_cases:
            dispatcher = open_deepep(  # proves its sum, or raises
                context.group,
                device_group,
                case.placement.first_expert,
                hidden=GPU_HIDDEN,
                num_topk=case.num_topk,
                num_max_tokens_per_rank=MOST,
                dtype=torch.bfloat16,
                device=device,
                reduction=resolve_multiple_reduction(
                    level, 0, 0, ep_size=context.world_size, transport_can=True
                ),
            )
            results[level].append(run_case(dispatcher, case, context.rank, GPU_HIDDEN, str(device)))
    torch.cuda.synchronize()
    context.group.all_gather_bytes(b"")
    dist.destroy_process_group(device_group)
    return results


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.skipif(
    importlib.util.find_spec("deep_ep") is None or torch.cuda.device_count() < 2,
    reason="needs deep_ep and two GPUs",
)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_deep_ep_itself_has_the_bits_of_loopback(ranks, world_size):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs")
    results = ranks(world_size, run_on_gpus, cases(world_size))
    conforms([found["topology"] for found in results], GPU_HIDDEN)
    conforms([found["batch"] for found in results], GPU_HIDDEN, presums=True)
