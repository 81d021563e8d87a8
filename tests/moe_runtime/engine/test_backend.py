"""From settings to an engine: which runner, which limits, and one clear error where the GPU is too small or absent."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.backend import exchange_buffer_bytes, plan_deployment, start_engine
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.cpu_runner import CpuRunner
from moe_runtime.engine.kv_cache import default_num_blocks, gpu_num_blocks, kv_block_bytes
from moe_runtime.engine.llm import LLM
from moe_runtime.engine.model_loader import load_model, plan_model
from moe_runtime.errors import CapacityError
from moe_runtime.exit_codes import EXIT_NO_FIT, EXIT_USAGE
from moe_runtime.launch.serve import main as serve
from tests.checkpoints import tiny_config, write_checkpoint
from tests.gpu_engine import gpu_config, write_gpu_checkpoint
from tests.ranks import RankContext

from moe_runtime.comm.gpu_exchange import MAX_SLICE  # isort: skip
from moe_runtime.engine.gpu_experts import exchange_sizes  # isort: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_gpu_checkpoint(tmp_path_factory.mktemp("backend"))


@pytest.fixture(autouse=True)
def own_logging(monkeypatch):
    """``serve`` leaves pytest's log handlers in place."""
    monkeypatch.setattr("moe_runtime.launch.serve.setup_logging", lambda rank, log_format: None)


@pytest.fixture
def pretended_gpu(monkeypatch):
    """``pretended_gpu(free_bytes)``: torch believes in a GPU, as far as planning asks."""

    def pretend(free_bytes: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free_bytes, 2 * free_bytes))
        properties = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)

    return pretend


def test_the_cpu_gets_the_cpu_runner_and_its_default_cache(folder):
    config = EngineConfig(model=str(folder), device="cpu")
    plan = plan_model(config)
    deployment = plan_deployment(plan, config)
    assert deployment.num_kv_blocks == default_num_blocks(plan.config, plan.torch_dtype, 64, 512)
    model = load_model(plan, config, RankGroup())
    engine = start_engine(model, deployment, config, RankGroup())
    assert isinstance(engine.runner, CpuRunner)
    assert not engine.runner.overlaps


def test_limits_follow_the_cache(folder):
    config = EngineConfig(model=str(folder), device="cpu", kv_cache_blocks=3)
    limits = plan_deployment(plan_model(config), config).limits
    assert (limits.vocab_size, limits.max_model_len, limits.max_kv_tokens) == (96, 512, 192)


def test_a_gpu_asked_for_where_there_is_none_is_refused(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device \(cuda\) must be cpu here: torch sees no GPU"):
        LLM(str(folder), device="cuda")


def test_a_rank_without_a_gpu_of_its_own_is_refused(folder, pretended_gpu, monkeypatch):
    pretended_gpu(80 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = (
        r"device \(auto\) must be cpu with more ranks on a host than GPUs: here are 3 ranks, and torch sees 2"
    )
    config = EngineConfig(model=str(folder))
    for rank in range(3):  # the fault is every rank's, or those with a GPU would wait for those without
        with pytest.raises(ValueError, match=message):
            plan_model(config, RankGroup(rank=rank + 3, size=6, local_rank=rank, local_size=3))
    with pytest.raises(ValueError, match=message):
        plan_model(config, RankGroup(rank=2, size=3))
    plan = plan_model(config, RankGroup(rank=3, size=4, local_rank=1, local_size=2))
    assert plan.device == torch.device("cuda", 1)


def test_the_one_gpu_that_a_rank_is_shown_is_its_own(folder, pretended_gpu, monkeypatch):
    pretended_gpu(80 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    plan = plan_model(EngineConfig(model=str(folder)), RankGroup(rank=3, size=4))
    assert plan.device == torch.device("cuda", 0)


def test_a_missing_triton_is_named_before_weights_are_read(folder, pretended_gpu, monkeypatch):
    pretended_gpu(80 << 30)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs Triton: install the package's gpu extra"):
        plan_model(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_only_layers": [0]}, "layers without experts are not implemented on the GPU yet"),
        ({"head_dim": 16}, r"head_dim \(16\) must be 32, 64 or 128"),
        ({"num_attention_heads": 9, "num_key_value_heads": 1}, r"must be 1 to 8 times num_kv_heads \(1\)"),
    ],
)
def test_a_model_the_gpu_path_cannot_run_is_refused_by_name(changes, message, tmp_path, pretended_gpu):
    folder = write_checkpoint(tmp_path, gpu_config(**changes))
    assert plan_model(EngineConfig(model=str(folder), device="cpu")).device.type == "cpu"
    pretended_gpu(80 << 30)
    with pytest.raises(ValueError, match=message):
        plan_model(EngineConfig(model=str(folder)))


def test_gpu_blocks_are_what_is_free_but_no_more_than_the_sequences_need(folder, pretended_gpu):
    pretended_gpu(80 << 30)
    config = EngineConfig(model=str(folder), max_num_seqs=4)
    plan = plan_model(config)
    assert plan.device.type == "cuda"
    assert gpu_num_blocks(plan, config) == 4 * 8
    assert plan_deployment(plan, replace(config, kv_cache_blocks=5)).num_kv_blocks == 5
    greedy = replace(config, max_num_seqs=2**16, max_num_batched_tokens=2**16)
    pretended_gpu(4 << 30)
    few = gpu_num_blocks(plan, greedy)
    assert 8 <= few < 2**16 * 8
    long = replace(plan, max_model_len=64 * plan.max_model_len)  # whose split attention keeps more results
    assert gpu_num_blocks(long, greedy) < few
    pretended_gpu(5 << 30)
    assert gpu_num_blocks(plan, greedy) > few
    assert gpu_num_blocks(plan, replace(greedy, gpu_memory_utilization=0.85)) < gpu_num_blocks(plan, greedy)


def test_the_transport_decides_what_buffers_take(folder, pretended_gpu, monkeypatch):
    pretended_gpu(9 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = EngineConfig(model=str(folder), max_num_seqs=2**16, max_num_batched_tokens=2**16)
    plan = plan_model(config, RankGroup(size=4))
    for dispatcher in ("auto", "collective", "symmetric"):  # what was asked for says nothing
        wanted = replace(config, dispatcher=dispatcher)
        symmetric, collective = (
            gpu_num_blocks(plan, wanted, 4, name) for name in ("symmetric", "collective")
        )
        assert symmetric > collective > 0


def plan_on_little_memory(context: RankContext, folder: str, free_gib: list[int]) -> str:
    """As if every rank had a GPU of its own with as much free."""
    free_bytes = free_gib[context.rank] << 30
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: context.world_size)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free_bytes, 80 << 30))
        properties = SimpleNamespace(multi_processor_count=132)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        config = EngineConfig(model=folder, max_num_seqs=2**14, max_num_batched_tokens=2**14)
        plan = plan_model(config, context.group)
        try:
            return str(plan_deployment(plan, config, context.group, "symmetric").num_kv_blocks)
        except CapacityError as error:
            return str(error)


def test_a_gpu_that_is_too_full_is_told_on_all_ranks(ranks, folder):
    found = ranks(2, plan_on_little_memory, str(folder), [20, 2])
    assert found[0] == found[1]
    assert found[0].startswith("rank 1: the GPU has 2.0 GiB free")
    few = ranks(2, plan_on_little_memory, str(folder), [6, 20])
    many = ranks(2, plan_on_little_memory, str(folder), [20, 20])
    assert few[0] == few[1]
    assert int(few[0]) < int(many[0])


def test_too_little_memory_says_what_to_change_and_serve_exits_3(folder, pretended_gpu, capsys):
    pretended_gpu(1 << 30)
    config = EngineConfig(model=str(folder))
    with pytest.raises(CapacityError, match=r"1\.0 GiB free.*lower max_model_len or max_num_batched_tokens"):
        plan_deployment(plan_model(config), config)
    assert serve(["--model", str(folder), "--port", "0"]) == EXIT_NO_FIT
    assert "error: the model does not fit: the GPU has 1.0 GiB free" in capsys.readouterr().err


def test_serve_refuses_a_model_the_gpu_cannot_run_with_the_code_of_usage(tmp_path, pretended_gpu, capsys):
    folder = write_checkpoint(tmp_path, tiny_config("qwen3_moe", head_dim=16))
    pretended_gpu(80 << 30)
    with pytest.raises(SystemExit) as left:
        serve(["--model", str(folder), "--port", "0"])
    assert left.value.code == EXIT_USAGE
    assert "head_dim (16) must be 32, 64 or 128" in capsys.readouterr().err


def test_rows_that_kernels_cannot_address_are_refused_on_gpus(folder, pretended_gpu):
    pretended_gpu(80 << 30)
    config = EngineConfig(model=str(folder), max_num_batched_tokens=2**26, max_num_seqs=1)
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(67108864\) must be at most \d+ on GPUs"):
        plan_model(config)


def test_buffers_of_the_exchange_are_reported_in_bytes(folder):
    from tests.gpu_engine import gpu_llm

    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_blocks": 4}
    alone = gpu_llm(folder, **limits)
    assert exchange_buffer_bytes(alone.model, alone.group) == 0
    virtual = gpu_llm(folder, dispatcher="loopback", loopback_ranks=2, **limits)
    assert exchange_buffer_bytes(virtual.model, virtual.group) == virtual.model.decoder.experts.num_bytes > 0
    on_cpu = LLM(str(folder), device="cpu", **limits)
    assert exchange_buffer_bytes(on_cpu.model, on_cpu.group) == 0


def test_virtual_ranks_regions_count_as_buffers(folder, pretended_gpu):
    pretended_gpu(80 << 30)
    config = EngineConfig(
        model=str(folder), max_num_seqs=10**6, max_num_batched_tokens=2**20, loopback_ranks=4
    )
    plan = plan_model(config)
    regions = 4 * exchange_sizes(plan, 4, 2**18).symmetric_bytes
    scratch = (2**20 - MAX_SLICE) * plan.config.num_experts_per_tok * 2
    scratch *= plan.config.moe_intermediate_size + plan.config.hidden_size
    fewer = gpu_num_blocks(plan, config) - gpu_num_blocks(plan, config, 1, "loopback")
    assert abs(fewer - (regions - scratch) / kv_block_bytes(plan.config, plan.torch_dtype)) <= 1
