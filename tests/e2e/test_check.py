"""The check as its users start it: under torchrun, with the digest of one rank."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from moe_runtime.launch.check import main
from tests.checkpoints import tiny_config, write_checkpoint
from tests.rank_programs import run_to_end

FLAGS = ["--num-prompts", "6", "--max-tokens", "4"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("check") / "tiny", tiny_config("qwen3_moe")))


def check(world_size: int, *flags: str) -> subprocess.CompletedProcess[str]:
    return run_to_end(world_size, "-m", "moe_runtime.check", *flags, timeout_s=120)


def test_two_ranks_print_one_table_and_the_digest_of_one_rank(model: str, tmp_path: Path) -> None:
    alone, together = tmp_path / "1.json", tmp_path / "2.json"
    assert main(["--model", model, *FLAGS, "--axes", "again", "--json", str(alone)]) == 0
    digest = json.loads(alone.read_text())["digest"]
    axes = ["again", "shuffled", "alone", "arrival", "chunks", "scored"]
    done = check(
        2, "--model", model, *FLAGS, "--axes", *axes, "--json", str(together), "--expect-digest", digest
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(together.read_text())
    assert content["digest"] == digest
    assert content["facts"]["ranks"] == 2
    assert [axis["name"] for axis in content["axes"]] == axes
    assert done.stdout.count("digest: ") == 1
    assert done.stdout.count("passed: all outputs are equal") == 1


@pytest.mark.slow
def test_groups_of_two_print_the_digest_of_one_rank(model: str, tmp_path: Path) -> None:
    alone, together = tmp_path / "1.json", tmp_path / "4.json"
    assert main(["--model", model, *FLAGS, "--axes", "again", "--json", str(alone)]) == 0
    digest = json.loads(alone.read_text())["digest"]
    flags = ["--tp", "2", "--axes", "arrival", "chunks", "--json", str(together), "--expect-digest", digest]
    done = check(4, "--model", model, *FLAGS, *flags)
    assert done.returncode == 0, done.stderr
    content = json.loads(together.read_text())
    assert content["digest"] == digest
    assert (content["facts"]["ranks"], content["facts"]["tp"]) == (4, 2)
    assert done.stdout.count("passed: all outputs are equal") == 1


def test_two_ranks_run_on_the_other_transport_in_groups_and_alone(model: str, tmp_path: Path) -> None:
    alone, together = tmp_path / "1.json", tmp_path / "2.json"
    assert main(["--model", model, *FLAGS, "--axes", "topology", "--json", str(alone)]) == 0
    content = json.loads(alone.read_text())
    assert list(content["axes"][0]["deployments"]) == ["loopback EP 2", "loopback EP 4", "loopback EP 8"]
    flags = ["--axes", "topology", "--json", str(together), "--expect-digest", content["digest"]]
    done = check(2, "--model", model, *FLAGS, *flags)
    assert done.returncode == 0, done.stderr
    (axis,) = json.loads(together.read_text())["axes"]
    assert axis["deployments"] == {"collective tp 1": 0, "symmetric tp 2": 0, "EP 1": 0}
    assert axis["num_cases"] == 3 * 6
    assert "topology: equal" in done.stdout
    assert done.stdout.count("equal on collective tp 1, symmetric tp 2, EP 1") == 1


@pytest.mark.slow
def test_a_tp_size_that_the_model_has_no_heads_for_is_told_and_the_rest_runs(
    model: str, tmp_path: Path
) -> None:
    file = tmp_path / "3.json"
    done = check(3, "--model", model, *FLAGS, "--axes", "topology", "--json", str(file))
    assert done.returncode == 0, done.stderr
    (axis,) = json.loads(file.read_text())["axes"]
    assert axis["deployments"] == {"collective tp 1": 0, "EP 1": 0}
    assert axis["not_run"] == {"symmetric tp 3": "num_attention_heads (4) must be divisible by tp (3)"}
    assert "symmetric tp 3 not run" in done.stdout


@pytest.mark.slow  # the rule is in tests/moe_runtime/engine/test_model_loader.py, how ranks leave is in the next test
def test_a_number_of_ranks_that_groups_do_not_divide_is_refused(model: str) -> None:
    done = check(2, "--model", model, *FLAGS, "--tp", "4")
    assert done.returncode != 0
    assert "error: world_size (2) must be divisible by tp (4)" in done.stderr


@pytest.mark.slow
def test_exact_ties_pass_every_axis_with_one_digest_on_one_four_and_eight_ranks(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "tied", tiny_config("qwen3_moe"), kind="tied"))
    flags = ["--model", folder, "--num-prompts", "24", "--max-tokens", "16"]  # enough to preempt
    digests = set()
    for world_size in (1, 4, 8):
        file = tmp_path / f"{world_size}.json"
        program = ["-m", "moe_runtime.check", *flags, "--json", str(file)]
        done = run_to_end(world_size, *program, timeout_s=400)
        assert done.returncode == 0, done.stdout + done.stderr
        digests.add(json.loads(file.read_text())["digest"])
    assert len(digests) == 1


def test_all_ranks_leave_with_code_4(model: str) -> None:
    done = check(2, "--model", model, *FLAGS, "--axes", "alone", "--control", "free-gemm")
    assert done.returncode != 0
    assert "control free-gemm was noticed by alone" in done.stdout
    # torchrun's summary has one entry for each rank.
    assert [line.split()[2] for line in done.stderr.splitlines() if line.strip().startswith("exitcode")] == [
        "4",
        "4",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "tp"), [(8, 1), (4, 2)])
def test_prefixes_from_the_caches_of_many_ranks_change_nothing(
    model: str, tmp_path: Path, world_size: int, tp: int
) -> None:
    file = tmp_path / "many.json"
    flags = ["--num-prompts", "16", "--max-tokens", "8", "--axes", "radix_cache", "--tp", str(tp)]
    done = check(world_size, "--model", model, *flags, "--json", str(file))
    assert done.returncode == 0, done.stderr
    (axis,) = json.loads(file.read_text())["axes"]
    assert axis["passed"]
    assert axis["num_cached_tokens"] > 1000
