"""What the run on eight GPUs starts: flags that the programs know, GPUs of their own, and time for all of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.launch.cli import parse_config
from moe_runtime.verify.config import CheckConfig
from tests.benchmark_modules import load_benchmark_module

steps_module = load_benchmark_module("ep8_steps")

BUDGET_S = 560
SIZES = (2, 4, 8)


def plan(folder: Path, device: str = "cuda", num_ranks: int = 8) -> list[Any]:
    setting = steps_module.Setting(
        device=device, num_ranks=num_ranks, model=folder / "model", results=folder, commit="abc"
    )
    steps: list[Any] = steps_module.plan_steps(setting, steps_module.PARTS)
    return steps


def commands_of(steps: list[Any]) -> list[Any]:
    return [command for step in steps for command in step.commands]


def size_of(command: Any) -> int:
    argv = list(command.argv)
    return int(argv[argv.index("--nproc-per-node") + 1])


def check_config(command: Any) -> CheckConfig:
    argv = list(command.argv)
    return parse_config(CheckConfig, argv[argv.index("moe_runtime.check") + 1 :], prog="check")


@pytest.mark.parametrize("num_ranks", SIZES)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_program_knows_its_flags(tmp_path: Path, device: str, num_ranks: int) -> None:
    programs = set()
    for command in commands_of(plan(tmp_path, device, num_ranks)):
        argv = list(command.argv)
        if "moe_runtime.check" in argv:
            config = check_config(command)
            assert (config.json, config.engine.device) == (command.result, device)
            programs.add("check")
            continue
        (file,) = (Path(word) for word in argv if word.endswith(".py"))
        options = load_benchmark_module(file.stem).parse_options(argv[argv.index(str(file)) + 1 :])
        assert options.output == command.result
        assert file.exists()
        programs.add(file.stem)
    on_device = {"bench_dispatch_cpu"} if device == "cpu" else {"bench_dispatch", "bench_all_reduce"}
    assert programs == {"check", "bench_engine", "bench_mixed"} | on_device


@pytest.mark.parametrize("num_ranks", SIZES)
def test_deployments_side_by_side_have_gpus_of_their_own(
    tmp_path: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    visible = [str(10 + gpu) for gpu in range(num_ranks)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(visible))
    for step in plan(tmp_path, num_ranks=num_ranks):
        given = [
            command.env.get("CUDA_VISIBLE_DEVICES", ",".join(visible)).split(",") for command in step.commands
        ]
        used = [gpu for gpus in given for gpu in gpus]
        assert len(used) == len(set(used))
        assert set(used) <= set(visible)
        sizes = [size_of(command) for command in step.commands if "torch.distributed.run" in command.argv]
        assert sizes in ([], [len(gpus) for gpus in given])


@pytest.mark.parametrize("num_ranks", SIZES)
def test_every_ep_and_tp_size_has_a_digest(tmp_path: Path, num_ranks: int) -> None:
    powers = {1 << i for i in range(num_ranks.bit_length())}
    checks = [
        command
        for command in commands_of(plan(tmp_path, num_ranks=num_ranks))
        if command.name.startswith("check Qwen3")
    ]
    configs = [(size_of(command), check_config(command)) for command in checks]
    assert {size for size, config in configs if config.engine.tp == 1} == powers
    assert {config.engine.tp for _, config in configs} == powers
    assert (
        len({(config.num_prompts, config.max_tokens, config.seed, config.full) for _, config in configs}) == 1
    )


def test_all_of_it_fits_into_the_budget_as_expected(tmp_path: Path) -> None:
    steps = plan(tmp_path)
    assert sum(step.expected_s for step in steps) <= BUDGET_S
    assert all(step.expected_s <= step.limit_s for step in steps)
    results = [command.result for command in commands_of(steps)]
    assert len(set(results)) == len(results)


def test_prompts_of_the_large_check_are_2500_tokens_with_a_deviation_of_1000(tmp_path: Path) -> None:
    (command,) = (c for c in commands_of(plan(tmp_path)) if c.name == "check Qwen3-30B-A3B EP 8")
    config = check_config(command)
    assert config.engine.max_model_len == 10_000  # verify/prompts.py: a quarter, with a deviation of a tenth
    assert (config.num_prompts, config.num_alone, config.max_tokens) == (64, 64, 50)
    assert {"alone", "graph", "placement", "topology"} <= set(config.axis_names)


def test_drafts_run_on_the_gpu_that_is_left(tmp_path: Path) -> None:
    (command,) = (
        c for c in commands_of(plan(tmp_path)) if c.name == "check Qwen3-30B-A3B EP 1, speculation 5"
    )
    config = check_config(command)
    assert (config.engine.speculative, config.engine.num_speculative_tokens) == ("ngram", 5)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_ranks \(3\) must be 2, 4 or 8"):
        plan(tmp_path, num_ranks=3)
    with pytest.raises(ValueError, match=r"device \(tpu\) must be cpu or cuda"):
        plan(tmp_path, device="tpu")
    setting = steps_module.Setting(device="cpu", num_ranks=2, model=tmp_path, results=tmp_path)
    with pytest.raises(ValueError, match=r"parts \(lunch\) must be among check"):
        steps_module.plan_steps(setting, ["check", "lunch"])


def test_the_script_refuses_unknown_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_benchmark_module("ep8")
    needed = ["ep8.py", "--output", "o.json", "--page", "p.md"]
    monkeypatch.setattr(sys, "argv", [*needed, "--parts", "check,lunch"])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 2
    assert "must be different ones of check,dispatch,engine,server" in capsys.readouterr().err


def test_multicast_is_off_for_all_that_is_started() -> None:
    assert load_benchmark_module("ep8").MULTICAST_OFF == {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
    }
