"""The engine on a GPU: the built-in model and four layers of the Qwen3-30B-A3B shape; transformers; serving.

``tools/run_gpu_tests.sh`` runs them. Groups run beside each other on one GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.request import SamplingParams
from moe_runtime.launch.audit import main as audit
from moe_runtime.verify.checker import check
from moe_runtime.verify.config import CheckConfig
from moe_runtime.verify.report import CheckExit
from tests.checkpoints import tiny_config, write_checkpoint, write_with_transformers
from tests.gpu_engine import gpu_llm, gpu_logits, qwen3_30b_config
from tests.servers import running_server

pytestmark = pytest.mark.gpu

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Of logits against transformers in fp32: largest difference (fp32) or root mean square (bf16) over the largest one."""
BF16_RATIO = 1.5  # our distance from fp32 over that of transformers in bf16
LEAST_MARGIN = {"float32": 1e-5, "bfloat16": 0.1}  # of router logits; below it roundings choose the expert
CPU_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}  # of logprobs: largest difference

NUM_PROMPTS = 64
GREEDY = SamplingParams(
    temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5, seed=0, return_routed_experts=True
)


@pytest.fixture(scope="module")
def builtin() -> LLM:
    return LLM("builtin", device="cuda", max_num_seqs=64, max_num_batched_tokens=4096)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = qwen3_30b_config(tmp_path_factory.mktemp("qwen"), num_hidden_layers=4)
    return LLM(
        str(folder),
        device="cuda",
        load_format="dummy",
        max_model_len=4096,
        max_num_seqs=256,
        max_num_batched_tokens=16384,
    )


MODELS = [
    pytest.param("builtin", marks=pytest.mark.xdist_group("builtin")),
    pytest.param("qwen", marks=pytest.mark.xdist_group("qwen")),
]


@pytest.fixture
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A loaded model, under its own limits again afterwards."""
    found: LLM = request.getfixturevalue(request.param)
    config = found.config
    yield found
    if found.config != config:
        found.reconfigure(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enforce_eager=config.enforce_eager,
        )


def prompt_of(llm: LLM, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(llm.limits.vocab_size - 8, (length,), generator=generator).tolist()
    return ids


def cases_of(llm: LLM, num: int = NUM_PROMPTS) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 16 to 960 tokens, greedy and seeded in turn."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(16, 960, (num,), generator=generator).tolist()
    seeded = [replace(GREEDY, temperature=0.8, top_p=0.95, top_k=50 * (i % 3), seed=i) for i in range(num)]
    return (
        [prompt_of(llm, length, i) for i, length in enumerate(lengths)],
        [seeded[i] if i % 2 else GREEDY for i in range(num)],
    )


def run(llm: LLM, cases: tuple[list[list[int]], list[SamplingParams]], which: list[int]) -> dict[int, Any]:
    prompts, params = cases
    results = llm.generate([prompts[i] for i in which], [params[i] for i in which])
    return {i: result.outputs[0] for i, result in zip(which, results, strict=True)}


@contextlib.contextmanager
def silent(what: str) -> Iterator[Callable[[int, int], None]]:
    yield lambda done, total: None


@pytest.mark.parametrize("llm", MODELS, indirect=True)
def test_company_order_and_repetition_change_nothing(llm: LLM) -> None:
    cases, everything = cases_of(llm), list(range(NUM_PROMPTS))
    reference = run(llm, cases, everything)
    assert len({output.token_ids for output in reference.values()}) > NUM_PROMPTS // 2
    assert run(llm, cases, everything) == reference
    assert run(llm, cases, everything[::-1]) == reference
    for first in range(0, NUM_PROMPTS, 8):
        part = everything[first : first + 8]
        assert run(llm, cases, part) == {i: reference[i] for i in part}
    for i in everything[:16]:
        assert run(llm, cases, [i])[i] == reference[i]


@pytest.mark.parametrize("llm", MODELS, indirect=True)
def test_graphs_and_chunk_sizes_change_nothing(llm: LLM) -> None:
    cases, which = cases_of(llm), list(range(24))
    reference = run(llm, cases, which)
    llm.reconfigure(enforce_eager=True)
    assert run(llm, cases, which) == reference
    llm.reconfigure(enforce_eager=False)
    for size in (63, 64, 257, 1000, 3000):
        llm.reconfigure(max_num_seqs=min(24, size), max_num_batched_tokens=size)
        assert run(llm, cases, which) == reference


@pytest.mark.parametrize("llm", MODELS, indirect=True)
def test_output_scored_as_prompt_has_the_generated_logprobs(llm: LLM) -> None:
    cases, which = cases_of(llm), list(range(16))
    reference = run(llm, cases, which)
    score = replace(GREEDY, max_tokens=0, logprobs=None, prompt_logprobs=5)
    whole = [cases[0][i] + list(reference[i].token_ids) for i in which]
    for i, result in zip(which, llm.generate(whole, score), strict=True):
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs[-32:] == reference[i].logprobs


@pytest.mark.xdist_group("qwen")
@pytest.mark.parametrize("llm", ["qwen"], indirect=True)
def test_long_prompts_alone_together_and_scored(llm: LLM) -> None:
    prompts = [prompt_of(llm, length, length) for length in (2400, 2500, 2561)]
    alone = [llm.generate([prompt], GREEDY)[0].outputs[0] for prompt in prompts]
    others = cases_of(llm)[0][:29]
    together = llm.generate([*others, *prompts], GREEDY)
    assert [result.outputs[0] for result in together[-3:]] == alone
    score = replace(GREEDY, max_tokens=0, logprobs=None, prompt_logprobs=5)
    for prompt, output in zip(prompts, alone, strict=True):
        [scored] = llm.generate([prompt + list(output.token_ids)], score)
        assert scored.prompt_logprobs is not None
        assert scored.prompt_logprobs[-32:] == output.logprobs


@pytest.mark.xdist_group("qwen")
@pytest.mark.parametrize("llm", ["qwen"], indirect=True)
def test_steps_with_prompts_are_graphs_filled_with_inert_rows_and_have_the_bits_of_launches(llm: LLM) -> None:
    lengths = (192, 193, 257, 384, 385, 700, 2047, 2048, 2049)
    params = replace(GREEDY, max_tokens=4, prompt_logprobs=3)
    prompts = [prompt_of(llm, length, length) for length in lengths]
    found = [llm.generate([prompt], params)[0] for prompt in prompts]
    graphs = llm.engine.runner.graphs
    assert all(graphs.has(bucket, "mixed") for bucket in (384, 512, 768, 2048))
    llm.reconfigure(enforce_eager=True)
    assert [llm.generate([prompt], params)[0] for prompt in prompts] == found


@pytest.mark.parametrize("llm", MODELS, indirect=True)
def test_the_check_passes_on_every_axis(llm: LLM) -> None:
    engine = EngineConfig(model=llm.config.model)
    config = CheckConfig(num_prompts=24, max_tokens=16, engine=engine)
    report = check(llm, config, silent)
    not_passed = {axis.name for axis in report.axes if not axis.passed}
    assert not_passed == (set() if llm.tokenizer else {"structured_output"}), report
    deployments = {name for axis in report.axes for name in axis.deployments}
    assert {
        f"loopback EP {size} with{out} graphs" for size in (2, 4, 8) for out in ("", "out")
    } <= deployments
    assert report.exit_code is CheckExit.EQUAL


@pytest.mark.xdist_group("qwen")
@pytest.mark.parametrize("llm", ["qwen"], indirect=True)
@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "denormal", "huge", "cancelling"])
def test_a_hostile_request_changes_no_other(llm: LLM, value: str) -> None:
    hidden = 2048
    rows = {
        "inf": torch.full((hidden,), torch.inf),
        "-inf": torch.full((hidden,), -torch.inf),
        "nan": torch.full((hidden,), torch.nan),
        "denormal": torch.full((hidden,), 1e-40),
        "huge": torch.full((hidden,), 3e38),
        "cancelling": torch.tensor([4096.0, 1.0, -4096.0, 1.0]).repeat(hidden // 4),
    }
    cases, which = cases_of(llm), list(range(12))
    reference = run(llm, cases, which)
    token = llm.limits.vocab_size - 1  # in no other prompt
    embedding = llm.model.decoder.embedding
    kept = embedding[token].clone()
    prompts = [cases[0][i] for i in which]
    params = [cases[1][i] for i in which]
    try:
        embedding[token] = rows[value].to(embedding)
        for place in (0, 5, 12):
            for length in (1, 300):
                batch = [*prompts[:place], [token] * length, *prompts[place:]]
                results = llm.generate(batch, [*params[:place], GREEDY, *params[place:]])
                del results[place]
                assert {i: r.outputs[0] for i, r in enumerate(results)} == reference
    finally:
        embedding[token] = kept


@pytest.mark.xdist_group("oracle")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        ("mixtral", {}),
        ("mixtral", {"sliding_window": 70}),
    ],
    ids=["qwen", "qwen window", "mixtral", "mixtral window"],
)
def test_logits_agree_with_transformers(
    model_type: str, changes: dict[str, Any], dtype: str, tmp_path: Any
) -> None:
    config = tiny_config(model_type, head_dim=32, **changes)
    model = write_with_transformers(tmp_path, config, seed=1)
    llm = gpu_llm(tmp_path, dtype=dtype, max_num_seqs=1, kv_cache_blocks=8)
    device = llm.model.decoder.embedding.device
    num_tokens = 300 if device.type == "cuda" else 40
    ids = torch.randint(128, (num_tokens,), generator=torch.Generator().manual_seed(2)).tolist()
    logits = gpu_logits(llm, ids).float()
    tokens = torch.tensor([ids], device=device)
    with torch.no_grad():
        exact = model.to(device)(tokens, output_router_logits=True)
        theirs = model.to(getattr(torch, dtype))(tokens).logits[0].float()
    num_topk = model.config.num_experts_per_tok
    margins = torch.full((num_tokens,), torch.inf, device=device)
    for router_logits in exact.router_logits:
        ranked = router_logits.float().sort(1, descending=True).values
        margins = torch.minimum(margins, ranked[:, num_topk - 1] - ranked[:, num_topk])
    kept = margins >= LEAST_MARGIN[dtype]
    assert kept.sum() > num_tokens / 4
    expected = exact.logits[0].float()
    scale = expected.abs().max()
    ours, other = (logits - expected)[kept], (theirs - expected)[kept]
    if dtype == "float32":
        assert ours.abs().max() / scale <= TOLERANCE[dtype]
        return
    assert ours.square().mean().sqrt() / scale <= TOLERANCE[dtype]
    assert ours.square().mean() <= BF16_RATIO**2 * other.square().mean()


@pytest.mark.xdist_group("oracle")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpu_agrees_to_the_accuracy_of_the_dtype(dtype: str) -> None:
    options: dict[str, Any] = {"dtype": dtype, "max_num_seqs": 16, "max_num_batched_tokens": 1024}
    ours, theirs = LLM("builtin", device="cuda", **options), LLM("builtin", device="cpu", **options)
    prompts = [prompt_of(ours, length, length) for length in (20, 65, 200)]
    score = replace(GREEDY, max_tokens=0, logprobs=None, prompt_logprobs=0)
    pairs = [
        abs(a.logprob - b.logprob)
        for left, right in zip(ours.generate(prompts, score), theirs.generate(prompts, score), strict=True)
        for a, b in zip((left.prompt_logprobs or ())[1:], (right.prompt_logprobs or ())[1:], strict=True)
        if a is not None and b is not None
    ]
    assert len(pairs) == 282
    assert sum(pairs) / len(pairs) < CPU_TOLERANCE[dtype] / 4
    assert sorted(pairs)[int(0.95 * len(pairs))] < CPU_TOLERANCE[dtype]


@pytest.mark.xdist_group("float32")
def test_a_float32_model_keeps_its_bits_too() -> None:
    llm = LLM("builtin", device="cuda", dtype="float32", max_num_seqs=24, max_num_batched_tokens=4096)
    cases, which = cases_of(llm), list(range(12))
    reference = run(llm, cases, which)
    assert run(llm, cases, which[::-1]) == reference
    for i in which[:4]:
        assert run(llm, cases, [i])[i] == reference[i]
    llm.reconfigure(enforce_eager=True, max_num_batched_tokens=100)
    assert run(llm, cases, which) == reference


@pytest.mark.xdist_group("float32")
@pytest.mark.parametrize("kind", ["heavy_tailed", "cancelling"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hostile_weights_keep_their_bits(kind: str, dtype: str, tmp_path: Any) -> None:
    folder = write_checkpoint(tmp_path, tiny_config("qwen3_moe", head_dim=32, dtype=dtype), kind=kind)
    llm = LLM(str(folder), device="cuda", max_num_seqs=40, max_num_batched_tokens=400)
    prompts = [prompt_of(llm, 5 + 11 * i, i) for i in range(36)]
    params = replace(GREEDY, max_tokens=12)
    together = llm.generate(prompts, params)
    for i in (0, 7, 20, 35):
        assert llm.generate([prompts[i]], params)[0] == together[i]
    llm.reconfigure(max_num_seqs=40, max_num_batched_tokens=65)
    assert llm.generate(prompts, params) == together


def swap_halves(tensors: dict[str, torch.Tensor]) -> None:
    """The weights of each two experts with equal routers change places."""
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    for name, tensor in experts.items():
        layer, expert_and_rest = name.split(".experts.")
        expert, rest = expert_and_rest.split(".", 1)
        tensors[f"{layer}.experts.{(int(expert) + 4) % 8}.{rest}"] = tensor


@pytest.mark.xdist_group("ties")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_ties_of_experts_and_tokens_pass_every_axis(dtype: str, tmp_path: Any) -> None:
    config = tiny_config("qwen3_moe", head_dim=32, dtype=dtype)
    folder = write_checkpoint(tmp_path / "tied", config, kind="tied")
    llm = LLM(str(folder), device="cuda", max_num_seqs=32, max_num_batched_tokens=512)
    prompts = [prompt_of(llm, 3 + 17 * i, i) for i in range(20)]
    found = [result.outputs[0] for result in llm.generate(prompts, GREEDY)]
    for output in found:
        assert max(output.token_ids) < 64
        assert output.logprobs is not None
        assert output.routed_experts is not None
        for token_id, entry in zip(output.token_ids, output.logprobs, strict=True):
            assert entry.top_ids[:2] == (token_id, token_id + 64)
            assert entry.top_logprobs[:2] == (entry.logprob, entry.logprob)
        for row in output.routed_experts.reshape(-1, 4).tolist():
            for low, high in ((0, 4), (1, 5), (2, 3), (3, 6), (6, 7)):
                assert high not in row or low in row[: row.index(high)]
    check_config = CheckConfig(num_prompts=24, max_tokens=16, engine=EngineConfig(model=str(folder)))
    report = check(llm, check_config, silent)
    assert {axis.name for axis in report.axes if not axis.passed} <= {"structured_output"}, report
    assert report.exit_code is CheckExit.EQUAL
    # Control: which of two tied experts is chosen matters.
    swapped = write_checkpoint(tmp_path / "swapped", config, kind="tied", edit=swap_halves)
    llm = LLM(str(swapped), device="cuda", max_num_seqs=32, max_num_batched_tokens=512)
    assert all(
        result.outputs[0].logprobs != output.logprobs
        for result, output in zip(llm.generate(prompts, GREEDY), found, strict=True)
    )


@pytest.mark.xdist_group("serving")
@pytest.mark.parametrize(("model", "dtype"), [("builtin", "bfloat16"), ("builtin", "float32")])
def test_canonical_bits_are_the_committed_ones(
    model: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = audit(["--model", model, "--dtype", dtype, "--only-golden", "--golden", "check"])
    said = capsys.readouterr().out
    if "no golden digests" in said:
        pytest.skip(said)
    assert code == 0, said
    assert "compared, 0 moved" in said


@pytest.mark.xdist_group("serving")
def test_the_server_answers_with_the_bits_of_the_offline_engine() -> None:
    prompt = "HAMLET\nWhat a piece of work is"
    params = SamplingParams(max_tokens=24, seed=7, logprobs=5, temperature=0.9, top_p=0.95)
    [offline] = LLM("builtin", device="cuda", max_num_seqs=8).generate([prompt], params)
    body = {"prompt": prompt, "max_tokens": 24, "seed": 7, "logprobs": 5, "temperature": 0.9, "top_p": 0.95}
    with running_server(1, "--device", "cuda", "--max-num-seqs", "8") as server:
        assert server.info()["device"] == "cuda"
        choice = server.complete(**body, return_token_ids=True)["choices"][0]
    assert tuple(choice["token_ids"]) == offline.outputs[0].token_ids
    assert choice["text"] == offline.outputs[0].text
    entries = offline.outputs[0].logprobs
    assert entries is not None
    assert choice["logprobs"]["token_logprobs"] == [entry.logprob for entry in entries]
