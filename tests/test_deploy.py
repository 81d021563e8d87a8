"""What deploy/ and docs/deploy.md name exists: flags, variables, paths, ports, metrics."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_runtime.config import HTTPConfig, ServeConfig
from moe_runtime.engine.request import RequestLimits
from moe_runtime.env import variables_of
from moe_runtime.launch import environment
from moe_runtime.server.client import RankState
from moe_runtime.server.config import ServerConfig
from moe_runtime.server.health import health_router
from moe_runtime.server.metrics import Metrics

ROOT = Path(__file__).parent.parent
PACKAGES = ("comm", "eplb", "kernels", "launch", "moe_runtime")
FILES = ("deploy/Dockerfile", "deploy/pod.yaml", "deploy/leaderworkerset.yaml", "deploy/serve.sbatch")
TEXTS = (*FILES, "deploy/alerts.yaml", "docs/deploy.md")


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(_read(path)))


def _containers() -> Iterator[dict[str, Any]]:
    pod, service = _documents("deploy/pod.yaml")
    assert (pod["kind"], service["kind"]) == ("Pod", "Service")
    yield from pod["spec"]["containers"]
    templates = _documents("deploy/leaderworkerset.yaml")[0]["spec"]["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        yield from templates[name]["spec"]["containers"]


def _help(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command, "--help"], capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def flags() -> set[str]:
    """Of the server."""
    return set(re.findall(r"--[a-z][a-z-]+", _help("moe_runtime.serve")))


@pytest.fixture(scope="module")
def torchrun_flags() -> set[str]:
    return {flag.replace("_", "-") for flag in re.findall(r"--[a-z][a-z_-]+", _help("torch.distributed.run"))}


@pytest.fixture(scope="module")
def metric_names() -> set[str]:
    """As Prometheus stores them."""
    limits = RequestLimits(vocab_size=8, max_model_len=8, max_kv_tokens=64)
    config = ServerConfig(host="h", port=1, served_model_name="m", model_dir="", limits=limits, world_size=1)
    metrics = Metrics(config, {0: RankState(pid=1, info={}, last_seen=0.0)})
    lines = [line for line in metrics.exposition().decode().splitlines() if not line.startswith("#")]
    return {re.split(r"[ {]", line)[0] for line in lines}


def test_the_commands_of_the_manifests_have_flags_that_exist(
    flags: set[str], torchrun_flags: set[str]
) -> None:
    commands = [" ".join([*c["command"], *c["args"]]) for c in _containers()]
    commands += [line for line in _read("deploy/serve.sbatch").splitlines() if "moe_runtime.serve" in line]
    assert len(commands) == 4
    for command in commands:
        launcher, _, ours = command.partition("moe_runtime.serve")
        named = set(re.findall(r"--[a-z][a-z-]+", ours))
        assert named <= flags, command
        assert {"--host", "--port"} <= named
        if "torchrun" in launcher:
            assert set(re.findall(r"--[a-z][a-z-]+", launcher)) <= torchrun_flags, command


def test_flags_and_variables_named_in_the_page_exist(flags: set[str], torchrun_flags: set[str]) -> None:
    page = _read("docs/deploy.md")
    others = {"--no-deps", "--target", "--kill-on-bad-exit", "--gpus-per-node"}
    named = set(re.findall(r"(?<![-\w])--[a-z][a-z-]+", page)) - others
    assert named
    assert sorted(named - flags - torchrun_flags) == []
    variables = {name for text in TEXTS for name in re.findall(r"MOE_RUNTIME_[A-Z_]+", _read(text))}
    assert "MOE_RUNTIME_API_KEY" in variables
    assert variables <= set(variables_of(ServeConfig))


def test_variables_of_launchers_named_in_the_page_are_read() -> None:
    source = Path(environment.__file__).read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:SLURM|LWS|MASTER|GLOO|LOCAL)_[A-Z_]+\b", _read("docs/deploy.md")))
    assert {"LWS_GROUP_SIZE", "SLURM_PROCID", "MASTER_ADDR", "GLOO_SOCKET_IFNAME"} <= named
    assert [name for name in sorted(named) if name not in source] == []


def test_probes_ask_paths_and_ports_that_exist() -> None:
    routes = {route.path for route in health_router(None).routes}  # type: ignore[arg-type, attr-defined]
    port = HTTPConfig().port
    probed = 0
    for container in _containers():
        command = " ".join([*container["command"], *container["args"]])
        assert f"--port {port}" in command
        probes = [
            container[f"{kind}Probe"]
            for kind in ("startup", "readiness", "liveness")
            if f"{kind}Probe" in container
        ]
        assert len(probes) == (3 if "ports" in container else 0)
        for probe in probes:
            assert probe["httpGet"]["path"] in routes
            assert probe["httpGet"]["port"] == container["ports"][0]["name"]
            assert container["ports"][0]["containerPort"] == port
        probed += len(probes)
    assert probed == 6
    assert f"EXPOSE {port}" in _read("deploy/Dockerfile")


def test_pods_have_longer_to_end_than_requests_have_to_finish() -> None:
    specs = [_documents("deploy/pod.yaml")[0]["spec"]]
    templates = _documents("deploy/leaderworkerset.yaml")[0]["spec"]["leaderWorkerTemplate"]
    specs += [templates[name]["spec"] for name in ("leaderTemplate", "workerTemplate")]
    assert all(spec["terminationGracePeriodSeconds"] >= HTTPConfig().drain_timeout_s + 20 for spec in specs)


def test_leader_and_workers_run_the_same() -> None:
    templates = _documents("deploy/leaderworkerset.yaml")[0]["spec"]["leaderWorkerTemplate"]
    leader, worker = (
        templates[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate")
    )
    extra = {"ports", "startupProbe", "readinessProbe", "livenessProbe"}
    assert {key: value for key, value in leader.items() if key not in extra} == worker


def test_metrics_of_the_page_and_the_alerts_exist(metric_names: set[str]) -> None:
    named = {
        name
        for path in ("docs/deploy.md", "deploy/alerts.yaml")
        for name in re.findall(r"moe_runtime_[a-z0-9_]+", _read(path))
    }
    assert len(named) > 5
    assert sorted(named - metric_names) == []
    rules = _documents("deploy/alerts.yaml")[0]["groups"][0]["rules"]
    assert all({"alert", "expr", "annotations"} <= set(rule) for rule in rules)


def test_the_image_copies_what_there_is_and_the_script_is_bash() -> None:
    for line in _read("deploy/Dockerfile").splitlines():
        if (match := re.match(r"COPY (?!--from)(\S+) ", line)) and match[1] != ".":
            assert (ROOT / match[1]).exists()
    subprocess.run(["bash", "-n", str(ROOT / "deploy/serve.sbatch")], check=True)


def test_no_message_between_processes_is_a_pickle() -> None:
    """Neither by us nor by what torch.distributed and ZeroMQ offer for objects."""
    pattern = re.compile(r"\bpickle\b|pyobj|(broadcast|gather|scatter|send|recv)_object")
    files = [file for folder in PACKAGES for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    assert [str(file) for file in files if pattern.search(file.read_text(encoding="utf-8"))] == []


def test_exit_codes_of_the_page_are_those_of_the_others() -> None:
    tables = {
        page.name: set(re.findall(r"^\| (\d+) \|", page.read_text(encoding="utf-8"), re.MULTILINE))
        for page in (ROOT / "docs").glob("*.md")
    }
    codes = tables.pop("deploy.md")
    assert codes == {"0", "1", "2", "3", "4"}
    assert any(codes <= known for known in tables.values())
