"""From a folder, a hub id or builtin to a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.models.resolve import resolve_model


def test_builtin_is_the_package_folder() -> None:
    path = resolve_model("builtin")
    assert path.name == "builtin"
    assert (path / "__init__.py").is_file()


def test_an_existing_folder_is_itself_and_a_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "builtin").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name") == Path("owner/name")
    assert resolve_model("./builtin") == Path("builtin")
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.gguf.* must be a directory, .* not a file"):
        resolve_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "model", ["", "/no/such/folder", "./missing", "../missing", "a/b/c", "a//b", "a b/c", "x/-y"]
)
def test_what_is_neither_folder_nor_hub_id_is_refused_without_a_download(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise AssertionError("tried to download")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match="neither an existing directory nor a valid hub id"):
        resolve_model(model)


def test_a_hub_id_downloads_weights_and_text_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("Qwen/Qwen3-30B-A3B") == tmp_path
    assert asked["repo_id"] == "Qwen/Qwen3-30B-A3B"
    assert set(asked["allow_patterns"]) == {"*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"}


@pytest.mark.parametrize(
    "error", [OSError("no route"), ValueError("bad"), RuntimeError("first line\nsecond")]
)
def test_a_failed_download_is_one_clear_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CheckpointError, match="is not a directory, and as a hub id it cannot be") as caught:
        resolve_model("owner/name")
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


def test_offline_and_not_in_the_cache_is_the_same_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="cannot be downloaded"):
        resolve_model("owner/name")
