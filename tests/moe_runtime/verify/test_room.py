"""Whether another deployment's weights fit, and one answer for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.model_loader import ModelPlan, plan_model
from moe_runtime.errors import CapacityError
from moe_runtime.models.registry import tensor_specs
from moe_runtime.verify import room
from moe_runtime.verify.room import lack_of_room
from tests.ranks import RankContext


def meminfo(path: Path, num_kib: int) -> Path:
    path.write_text(f"MemTotal:       99999999 kB\nMemAvailable:   {num_kib} kB\n")
    return path


def whole_kib(plan: ModelPlan) -> int:
    return -(-4 * sum(prod(spec.shape) for spec in tensor_specs(plan.config)) // 1024)


@pytest.mark.parametrize(("spare_kib", "fits"), [(0, True), (-1, False)])
def test_a_rank_alone_needs_the_whole_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare_kib: int, fits: bool
) -> None:
    config = EngineConfig(model=str(tiny_model))
    plan = plan_model(config)
    monkeypatch.setattr(room, "MEMINFO", meminfo(tmp_path / "meminfo", whole_kib(plan) + spare_kib))
    reason = lack_of_room(plan, config, RankGroup(), is_alone=True)
    assert (reason == "") is fits
    assert fits or "and 1 ranks need 0.0 GiB for weights" in reason


def test_without_a_number_to_go_by_nothing_is_refused(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(tiny_model))
    monkeypatch.setattr(room, "MEMINFO", tmp_path / "nowhere")
    assert lack_of_room(plan_model(config), config, RankGroup(), is_alone=True) == ""


def test_a_gpu_without_room_for_one_sequence_says_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(tiny_model), kv_cache_blocks=3)
    asked: list[tuple[int | None, int]] = []

    def full(plan: ModelPlan, config: EngineConfig, num_ranks: int, draft: ModelPlan | None) -> int:
        assert draft is None
        asked.append((config.kv_cache_blocks, num_ranks))
        raise CapacityError("the GPU has 1.0 GiB free")

    monkeypatch.setattr(room, "gpu_num_blocks", full)
    plan = replace(plan_model(config), device=torch.device("cuda"))
    assert lack_of_room(plan, config, RankGroup(), is_alone=True) == "the GPU has 1.0 GiB free"
    assert asked == [(None, 1)]


def reasons_of_ranks(context: RankContext, model: str, files: list[str], is_alone: bool) -> str:
    config = EngineConfig(model=model)
    plan = plan_model(config, None if is_alone else context.group)
    before, room.MEMINFO = room.MEMINFO, Path(files[context.rank])
    try:
        return lack_of_room(plan, config, context.group, is_alone)
    finally:
        room.MEMINFO = before


def test_what_one_rank_lacks_is_the_answer_of_all(
    ranks: Callable[..., list[Any]], tiny_model: Path, tmp_path: Path
) -> None:
    kib = whole_kib(plan_model(EngineConfig(model=str(tiny_model))))
    files = [str(meminfo(tmp_path / str(i), n)) for i, n in enumerate([2 * kib, 2 * kib - 2])]
    first, second = ranks(2, reasons_of_ranks, str(tiny_model), files, True)
    assert "2 ranks need" in first
    assert first == second
    # Spread, each holds its experts alone.
    assert ranks(2, reasons_of_ranks, str(tiny_model), files, False) == ["", ""]
