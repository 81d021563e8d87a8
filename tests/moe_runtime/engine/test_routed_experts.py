"""Experts returned per token: the router's own, whatever the schedule, and what their bytes mean."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.llm import LLM, CompletionOutput
from moe_runtime.engine.messages import (
    ExpertLoadReport,
    RankReport,
    RankStats,
    SequenceOutput,
    decode_report,
    encode,
)
from moe_runtime.engine.request import SamplingParams
from moe_runtime.engine.routed_experts import (
    RoutedExperts,
    join_routed_experts,
    num_routed_tokens,
    routing_dtype,
)
from moe_runtime.engine.sequence import Sequence
from moe_runtime.kernels.router import route_reference
from moe_runtime.layers import mlp
from tests.checkpoints import tiny_config, write_checkpoint
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.ranks import RankContext

from moe_runtime.kernels.topk_triton import topk_reference  # isort: skip
from moe_runtime.layers import cuda_decoder  # isort: skip

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=6, return_routed_experts=True)
SCORE = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0, return_routed_experts=True)
PROMPTS = [[(7 * i + length) % 96 for i in range(length)] for length in (40, 1, 70)]
THREE = RoutedExperts("uint16", (3, 1, 2), bytes(range(12)))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_checkpoint(
        tmp_path_factory.mktemp("model"), tiny_config("qwen3_moe", num_experts_per_tok=3)
    )
    return LLM(str(folder), max_num_seqs=4)


def router_run(llm: LLM, token_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """``[tokens, layers, K]``: experts by a reference on the router logits of one step over all tokens."""
    seen: list[torch.Tensor] = []
    route, topk = mlp.route, cuda_decoder.topk
    num_topk = llm.model.plan.config.num_experts_per_tok

    def route_and_see(logits, *arguments):
        seen.append(route_reference(logits, *arguments)[0])
        return route(logits, *arguments)

    def topk_and_see(logits, num_tokens, *arguments, **options):
        seen.append(topk_reference(logits[: int(num_tokens)], num_topk, True)[0].cpu())
        topk(logits, num_tokens, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(mlp, "route", route_and_see)
        patch.setattr(cuda_decoder, "topk", topk_and_see)
        llm.generate([token_ids], SCORE)
    assert [ids.shape[0] for ids in seen] == [len(token_ids)] * llm.model.plan.config.num_layers
    return torch.stack(seen, 1).numpy()


def outputs_of(llm: LLM, params: SamplingParams = PARAMS) -> list[CompletionOutput]:
    return [choice for result in llm.generate(PROMPTS, params) for choice in result.outputs]


def test_each_token_s_experts_are_those_of_a_reference_router(llm, monkeypatch):
    llm.reconfigure(max_num_batched_tokens=16)
    found = outputs_of(llm)
    llm.reconfigure(max_num_batched_tokens=512)
    for prompt, output in zip(PROMPTS, found, strict=True):
        expected = router_run(llm, [*prompt, *output.token_ids[:-1]], monkeypatch)
        assert output.routed_experts.dtype == np.uint8
        assert np.array_equal(output.routed_experts, expected)
        assert not np.array_equal(output.routed_experts, np.sort(expected, 2)), "control: slots have an order"
        assert not np.array_equal(output.routed_experts[:, ::-1], expected), "control: layers have an order"


def test_the_gpu_s_experts_are_those_of_a_reference_router(tmp_path, monkeypatch):
    """With sequences that decode, chunks of prompts and inert rows beside them."""
    gpu = gpu_llm(
        write_gpu_checkpoint(tmp_path), max_num_seqs=4, max_num_batched_tokens=16, kv_cache_blocks=8
    )
    prompts = [prompt[:20] for prompt in PROMPTS]
    results = gpu.generate(prompts, replace(PARAMS, max_tokens=3))
    gpu.reconfigure(max_num_batched_tokens=64)
    for prompt, result in zip(prompts, results, strict=True):
        expected = router_run(gpu, [*prompt, *result.outputs[0].token_ids[:-1]], monkeypatch)
        assert np.array_equal(result.outputs[0].routed_experts, expected)
        assert not np.array_equal(result.outputs[0].routed_experts[1:], expected[:-1]) or len(expected) == 1


def test_recomputed_tokens_have_the_experts_they_had(llm, monkeypatch):
    llm.reconfigure(max_num_batched_tokens=32, kv_cache_blocks=16)
    expected = outputs_of(llm, replace(PARAMS, max_tokens=40))
    known: dict[tuple[str, int], bytes] = {}
    num_compared = 0
    add = Sequence.add_routing

    def compare(sequence: Sequence, start: int, routed: RoutedExperts) -> None:
        nonlocal num_compared
        token_bytes = len(routed.data) // routed.shape[0]
        for i in range(routed.shape[0]):
            key, ids = (sequence.request_id, start + i), routed.data[i * token_bytes : (i + 1) * token_bytes]
            num_compared += key in known
            assert known.setdefault(key, ids) == ids
        add(sequence, start, routed)

    monkeypatch.setattr(Sequence, "add_routing", compare)
    llm.reconfigure(kv_cache_blocks=2)
    assert outputs_of(llm, replace(PARAMS, max_tokens=40)) == expected
    assert llm.engine.scheduler.num_preemptions > 0
    assert num_compared > 0


def test_every_choice_has_its_own_and_nobody_else_has_any(llm):
    llm.reconfigure(max_num_batched_tokens=64, kv_cache_blocks=16)
    [result] = llm.generate(PROMPTS[:1], replace(PARAMS, n=3))
    for output in result.outputs:
        assert output.routed_experts.shape == (len(PROMPTS[0]) + PARAMS.max_tokens - 1, 2, 3)
        assert output.routing.first(len(PROMPTS[0])) == result.outputs[0].routing.first(len(PROMPTS[0]))
    assert len({output.routing for output in result.outputs}) == 3
    without = replace(PARAMS, return_routed_experts=False)
    asking, silent = llm.generate(PROMPTS[:2], [PARAMS, without])
    assert asking.outputs[0] == result.outputs[0]
    assert silent.outputs[0].routed_experts is None


def test_a_prompt_that_is_only_scored_has_all_its_tokens(llm):
    [result] = llm.generate(PROMPTS[:1], SCORE)
    assert result.outputs[0].routed_experts.shape[0] == len(PROMPTS[0])


def on_gpu_ranks(context: RankContext, folder: str, tp: int) -> list[CompletionOutput]:
    group = RankGroup(rank=context.rank, size=context.world_size, process_group=context.process_group)
    llm = gpu_llm(folder, group=group, tp=tp, dispatcher="collective", max_num_seqs=4, kv_cache_blocks=8)
    prompts = [prompt[:9] for prompt in PROMPTS]
    results = llm.generate(prompts, replace(PARAMS, max_tokens=3), ranks=[llm.num_engines - 1] * len(prompts))
    return [result.outputs[0] for result in results]


def test_gpu_ranks_give_what_one_gives(ranks, tmp_path):
    """On the last group; under tp a token's experts are known on its home rank alone."""
    folder = write_gpu_checkpoint(tmp_path)
    [expected] = ranks(1, on_gpu_ranks, str(folder), 1)
    assert all(
        output.routed_experts.shape[0] == len(p[:9]) + 2 for output, p in zip(expected, PROMPTS, strict=True)
    )
    for tp in (1, 2):
        assert ranks(2, on_gpu_ranks, str(folder), tp) == [expected] * 2, tp


def test_pieces_join_to_the_whole():
    assert join_routed_experts([THREE.first(1), THREE.after(1)]) == THREE
    assert join_routed_experts([THREE]) == THREE
    assert THREE.first(9) == THREE.after(0) == THREE
    assert THREE.after(2) == RoutedExperts("uint16", (1, 1, 2), bytes([8, 9, 10, 11]))
    assert THREE.after(7).shape == (0, 1, 2)
    with pytest.raises(AssertionError):
        join_routed_experts([THREE, RoutedExperts("uint8", (1, 1, 2), b"ab")])


def test_the_document_holds_little_endian_ids_in_base64():
    document = THREE.document()
    ids = np.frombuffer(base64.b64decode(document["data"]), "<u2").reshape(document["shape"])
    assert document["dtype"] == "uint16"
    assert ids[1, 0].tolist() == [4 + 5 * 256, 6 + 7 * 256]


def test_they_travel_with_an_output():
    output = SequenceOutput("r", 0, routed_experts=THREE)
    report = RankReport(0, 1, (output,), RankStats(), expert_load=(ExpertLoadReport(3, b"12345678"),))
    assert decode_report(encode(report)) == report


def test_the_last_output_token_has_no_entry():
    assert [num_routed_tokens(5, n) for n in (0, 1, 2)] == [5, 5, 6]
    assert [routing_dtype(n) for n in (256, 257)] == ["uint8", "uint16"]
