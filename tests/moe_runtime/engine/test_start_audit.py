"""The table and the short audit of a GPU engine's start."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from moe_runtime.comm.tensor_parallel import TensorParallel
from moe_runtime.env import cache_folder
from tests.gpu_engine import gpu_llm, write_gpu_checkpoint
from tests.kernels.triton_interpreter import DEVICE
from tests.ranks import RankContext

from moe_runtime.engine import start_audit  # isort: skip
from moe_runtime.kernels import gpu_audit  # isort: skip
from moe_runtime.engine.config import EngineConfig  # isort: skip
from moe_runtime.engine.model_loader import plan_model  # isort: skip
from moe_runtime.engine.start_audit import (  # isort: skip
    audit_folder,
    load_schedules,
    model_shapes,
)
from moe_runtime.kernels.audit_report import (  # isort: skip
    AuditRow,
    GpuAuditReport,
    device_key,
    save_report,
)
from moe_runtime.kernels.gpu_schedules import schedule_label  # isort: skip
from moe_runtime.layers.cuda_experts import LayerExperts  # isort: skip


def test_shapes_are_those_of_the_model():
    shapes = model_shapes(plan_model(EngineConfig(device="cpu")).config, torch.bfloat16)
    assert (shapes.hidden, shapes.width, shapes.num_experts, shapes.num_topk) == (256, 112, 16, 4)
    assert shapes.qkv_columns == (4 + 2 * 2) * 64
    assert shapes.windows == (None,)


def test_results_are_kept_in_the_users_cache_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert audit_folder(None) == tmp_path / "moe-runtime"
    assert audit_folder("/elsewhere") == Path("/elsewhere")
    assert cache_folder({}) == Path.home() / ".cache" / "moe-runtime"


def test_an_audit_of_this_device_takes_schedules_out_of_the_table(tmp_path):
    device = torch.device(DEVICE)
    before = load_schedules(device, torch.bfloat16, str(tmp_path)).rope()
    bad = AuditRow(
        op="rope", shape="any", dtype="bfloat16", m=1, schedule=schedule_label(before), equal=False
    )
    save_report(tmp_path, device_key(device), GpuAuditReport(rows=[bad]))
    assert load_schedules(device, torch.bfloat16, str(tmp_path)).rope() != before


def test_the_short_audit_runs_on_the_first_layers_weights(monkeypatch):
    class Layer:
        qkv, o_proj, router = (torch.zeros(i + 1) for i in range(3))
        experts = LayerExperts(w13=torch.zeros(4), w2=torch.zeros(5))

    class FakeDecoder:
        config = local = plan_model(EngineConfig(device="cpu")).config
        tensor_parallel = TensorParallel()
        dtype, device, pdl = torch.bfloat16, torch.device("cpu"), False
        layers = (Layer, None)
        lm_head = torch.zeros(9)
        schedules = object()

    seen = {}

    def record(shapes, schedules, device, weights, *, pdl):
        seen.update(weights, shapes=shapes, schedules=schedules, pdl=pdl)
        return 3

    monkeypatch.setattr(start_audit, "audit_short", record)
    start_audit.check_schedules(FakeDecoder)
    assert {name: seen[name].numel() for name in ("qkv", "o_proj", "router", "w13", "w2", "lm_head")} == {
        "qkv": 1, "o_proj": 2, "router": 3, "w13": 4, "w2": 5, "lm_head": 9,
    }  # fmt: skip
    assert seen["schedules"] is FakeDecoder.schedules
    assert seen["shapes"].hidden == 256
    assert seen["shapes"].num_local_experts == 4


def test_a_rank_with_fewer_experts_than_a_token_has_audits_made_up_ones(monkeypatch):
    class Layer:
        qkv, o_proj, router = (torch.zeros(1) for _ in range(3))
        experts = LayerExperts(w13=torch.zeros(3, 1), w2=torch.zeros(3, 1))

    class FakeDecoder:
        config = local = plan_model(EngineConfig(device="cpu")).config
        tensor_parallel = TensorParallel()
        dtype, device, pdl = torch.bfloat16, torch.device("cpu"), False
        layers = (Layer,)
        lm_head = torch.zeros(9)
        schedules = object()

    seen = {}

    def record(shapes, schedules, device, weights, *, pdl):
        seen.update(weights, shapes=shapes)
        return 3

    monkeypatch.setattr(start_audit, "audit_short", record)
    start_audit.check_schedules(FakeDecoder)
    assert "w13" not in seen
    assert seen["shapes"].num_local_experts is None


@pytest.mark.gpu
def test_the_engine_starts_on_this_gpu_with_every_schedule_checked(caplog):
    from moe_runtime.engine.llm import LLM

    caplog.set_level("INFO")
    LLM("builtin", device="cuda")
    assert "comparisons of schedules" in caplog.text


def audit_a_share(context: RankContext, folder: str, tp: int) -> int:
    options = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "kv_cache_blocks": 4,
        "dispatcher": "collective",
    }
    decoder = gpu_llm(Path(folder), group=context.group, tp=tp, **options).model.decoder
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_audit, "SHORT_MAX_ROWS", 1)
        patch.setattr(start_audit, "audit_short", partial(gpu_audit.audit_short, max_rows=1))
        return start_audit.check_schedules(decoder).num_comparisons


@pytest.mark.parametrize("tp", [2, 4])
def test_a_rank_of_a_group_audits_the_shapes_of_its_share(ranks, tmp_path, tp):
    folder = write_gpu_checkpoint(tmp_path, num_hidden_layers=1, num_experts=tp * 2)
    assert min(ranks(tp, audit_a_share, str(folder), tp)) > 10
