"""Logits against transformers (fp32, eager) over the configuration variants that the architectures have."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from moe_runtime.engine.kv_cache import KVCache
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.kernels.attention import BLOCK_SIZE, make_attention_plan
from moe_runtime.layers.decoder import ForwardInput
from tests.bits import assert_bits_equal
from tests.checkpoints import tiny_config, write_checkpoint, write_with_transformers

TOLERANCE = 1e-4  # fp32 logits, relative to the largest |logit|
LEAST_MARGIN = 1e-5  # of router logits; below it the reference's own choice is a matter of rounding
MOST_LEFT_OUT = 0.01

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

# head_dim is spelled out with yarn: the reference cannot derive it there for Mixtral.
BOTH: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tied embeddings": {"tie_word_embeddings": True},
    "wide heads": {"head_dim": 32},
    "narrow heads": {"head_dim": 8},
    "one key-value head": {"num_key_value_heads": 1},
    "as many key-value heads as heads": {"num_key_value_heads": 4},
    "odd sizes": {"hidden_size": 60, "vocab_size": 131, "head_dim": 10},
    "one expert per token": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 8},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    "yarn": {"head_dim": 16, "rope_parameters": YARN},
    "yarn betas": {
        "head_dim": 16,
        "rope_parameters": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    },
    "yarn factor": {"head_dim": 16, "rope_parameters": YARN | {"attention_factor": 1.3}},
    "yarn mscale": {"head_dim": 16, "rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7}},
    "llama3": {"rope_parameters": LLAMA3},
    "eps": {"rms_norm_eps": 1e-2},
}
QWEN: dict[str, dict[str, Any]] = {
    "no renormalisation": {"norm_topk_prob": False},
    "every second layer sparse": {"decoder_sparse_step": 2, "num_hidden_layers": 3},
    "a dense layer": {"mlp_only_layers": [1], "num_hidden_layers": 3},
    "attention bias": {"attention_bias": True},
    "window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "window off": {"use_sliding_window": False, "sliding_window": 8},
}
MIXTRAL: dict[str, dict[str, Any]] = {
    "window": {"sliding_window": 8},
    "window null": {"sliding_window": None},
    "window of two blocks and a bit": {"sliding_window": 140},
}
CASES = [("qwen3_moe", name, changes) for name, changes in (BOTH | QWEN).items()]
CASES += [("mixtral", name, changes) for name, changes in (BOTH | MIXTRAL).items()]


def our_logits(
    llm: LLM, ids: list[int], chunks: list[int], routing: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """``[len(ids), vocab]``, the prompt run in these chunks; ``routing`` gains each chunk's chosen experts."""
    decoder, config = llm.model.decoder, llm.model.plan.config
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    cache = KVCache(config, num_blocks, llm.model.plan.torch_dtype)
    hidden, start = [], 0
    for length in chunks:
        positions = torch.arange(start, start + length)
        batch = ForwardInput(
            token_ids=torch.tensor(ids)[positions],
            positions=positions,
            slot_mapping=positions,
            attention=make_attention_plan(
                [length], [start], [list(range(num_blocks))], config.num_query_heads_per_kv_head
            ),
            tokens_per_rank=(length,),
        )
        shape = (len(config.moe_layer_ids), length, config.num_experts_per_tok)
        chosen = torch.empty(shape, dtype=torch.int16)
        with torch.inference_mode():
            hidden.append(decoder.forward(batch, cache.layers, chosen))
        if routing is not None:
            routing.append(chosen)
        start += length
    with torch.inference_mode():
        return decoder.logits(torch.cat(hidden))


def reference(model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and per token the smallest routing margin over the layers."""
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_router_logits=True)
    num_topk = model.config.num_experts_per_tok
    margins = [torch.full((len(ids),), torch.inf)]
    for logits in out.router_logits:
        ranked = logits.float().sort(1, descending=True).values
        if num_topk < ranked.shape[1]:
            margins.append(ranked[:, num_topk - 1] - ranked[:, num_topk])
    return out.logits[0], torch.stack(margins).amin(0)


@pytest.mark.parametrize(
    ("model_type", "name", "changes"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_logits_agree_with_transformers(model_type, name, changes, tmp_path):
    config = tiny_config(model_type, **changes)
    model = write_with_transformers(tmp_path, config, seed=1)
    llm = LLM(str(tmp_path), max_num_seqs=1)
    vocab = config["vocab_size"]
    ids = torch.randint(vocab, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    expected, margins = reference(model, ids)
    logits = our_logits(llm, ids, [300])
    unclear = (margins < LEAST_MARGIN).nonzero().flatten().tolist()
    assert len(unclear) <= MOST_LEFT_OUT * len(ids), f"tokens whose reference routing is unclear: {unclear}"
    kept = margins >= LEAST_MARGIN
    scale = expected.abs().max()
    assert scale > 1, "logits are too small to say anything"
    difference = (logits - expected).abs()[kept].max() / scale
    assert difference <= TOLERANCE, f"largest difference is {difference:.2e} of the largest logit"
    assert_bits_equal(our_logits(llm, ids, [290, *[1] * 10]), logits, "decode past the window")
    assert_bits_equal(our_logits(llm, ids, [5, 60, 64, 171]), logits, "chunks")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_a_window_changes_only_tokens_past_it(model_type, tmp_path):
    on = QWEN["window"] if model_type == "qwen3_moe" else MIXTRAL["window"]
    ids = torch.randint(128, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    logits = []
    for name, changes in (("with", on), ("without", {})):
        folder = write_checkpoint(tmp_path / name, tiny_config(model_type, **changes))
        logits.append(our_logits(LLM(str(folder), max_num_seqs=1), ids, [40]))
    assert_bits_equal(logits[0][:8], logits[1][:8])
    assert not torch.isclose(logits[0][8:], logits[1][8:], rtol=1e-3).all(1).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_exactly_tied_experts_are_chosen_by_lowest_id_in_every_batch(model_type, dtype, tmp_path):
    folder = write_checkpoint(tmp_path, tiny_config(model_type), kind="tied")
    llm = LLM(str(folder), max_num_seqs=4, dtype=dtype)
    ids = torch.randint(128, (90,), generator=torch.Generator().manual_seed(4)).tolist()
    whole: list[torch.Tensor] = []
    logits = our_logits(llm, ids, [90], whole)
    ties = [(0, 4), (1, 5), (2, 3), (3, 6), (6, 7)]
    for row in whole[0].flatten(0, 1).tolist():
        for low, high in ties:
            if high in row:
                assert low in row
                assert row.index(low) < row.index(high)
    for chunks in ([1] * 90, [15, 16, 17, 42]):
        pieces: list[torch.Tensor] = []
        assert_bits_equal(our_logits(llm, ids, chunks, pieces), logits)
        assert_bits_equal(torch.cat(pieces, 1), whole[0])


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_a_router_of_zeros_chooses_the_first_experts(model_type, tmp_path):
    def clear_router(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("gate.weight"):
                tensor.zero_()

    llm = LLM(str(write_checkpoint(tmp_path, tiny_config(model_type), edit=clear_router)), max_num_seqs=1)
    routing: list[torch.Tensor] = []
    our_logits(llm, list(range(40)), [40], routing)
    num_topk = llm.model.plan.config.num_experts_per_tok
    assert routing[0].unique(dim=1).squeeze(1).tolist() == [list(range(num_topk))] * 2


def test_prompt_logprobs_are_the_reference_s_log_softmax(tmp_path):
    model = write_with_transformers(tmp_path, tiny_config("mixtral"), seed=5)
    ids = torch.randint(128, (70,), generator=torch.Generator().manual_seed(6)).tolist()
    expected, _ = reference(model, ids)
    expected = torch.log_softmax(expected, 1)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3, prompt_logprobs=3)
    result = LLM(str(tmp_path), max_num_seqs=1).generate([ids], params)[0]
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert result.outputs[0].logprobs is not None
    entries = [*result.prompt_logprobs[1:], result.outputs[0].logprobs[0]]
    tokens = [*ids[1:], result.outputs[0].token_ids[0]]
    assert tokens[-1] == int(expected[-1].argmax())
    for position, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(expected[position, token]), abs=1e-3)
        top = expected[position].topk(3)
        assert entry.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-3)
        assert list(entry.top_ids) == top.indices.tolist()


@pytest.mark.parametrize(
    ("model_type", "right", "wrong"),
    [
        ("qwen3_moe", {}, {"norm_topk_prob": False}),
        ("qwen3_moe", {}, {"rms_norm_eps": 2e-4}),
        ("qwen3_moe", QWEN["window"], QWEN["window"] | {"sliding_window": 9}),
        ("qwen3_moe", BOTH["yarn"], BOTH["yarn factor"]),
        ("qwen3_moe", BOTH["llama3"], {"rope_parameters": LLAMA3 | {"high_freq_factor": 4.5}}),
        ("mixtral", MIXTRAL["window"], MIXTRAL["window"] | {"sliding_window": 7}),
        ("mixtral", BOTH["linear"], {"rope_parameters": BOTH["linear"]["rope_parameters"] | {"factor": 2.6}}),
        ("mixtral", {}, {"num_experts_per_tok": 2}),
    ],
)
def test_control_one_wrong_field_is_seen(model_type, right, wrong, tmp_path):
    model = write_with_transformers(tmp_path, tiny_config(model_type, **right), seed=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    ids = torch.randint(128, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    expected, _ = reference(model, ids)
    difference = (our_logits(LLM(str(tmp_path), max_num_seqs=1), ids, [300]) - expected).abs().max()
    assert difference > TOLERANCE * expected.abs().max()
