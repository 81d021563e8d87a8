"""The protocol, on both kinds of source."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moe_runtime.models.checkpoint import DummyCheckpoint
from moe_runtime.models.model_config import TensorSpec
from moe_runtime.models.registry import load_model_config, tensor_specs
from moe_runtime.models.tensor_source import TensorSource


@pytest.fixture
def specs(folder: Callable[[str], Any]) -> tuple[TensorSpec, ...]:
    return tensor_specs(load_model_config(folder("mixtral_sharded").path))


@pytest.fixture(params=["checkpoint", "dummy"])
def source(
    request: pytest.FixtureRequest,
    folder: Callable[[str], Any],
    tmp_path: Any,
    specs: tuple[TensorSpec, ...],
) -> Iterator[TensorSource]:
    if request.param == "dummy":
        yield DummyCheckpoint(specs, "bfloat16", 0)
    else:
        from moe_runtime.models.checkpoint import Checkpoint

        with Checkpoint(tmp_path / "mixtral_sharded", specs) as checkpoint:
            yield checkpoint


def test_a_tensor_is_read_once(source: TensorSource, specs: tuple[TensorSpec, ...]) -> None:
    source.read(specs[0])
    with pytest.raises(RuntimeError, match=f"{specs[0].name}: read twice"):
        source.read(specs[0])
    with pytest.raises(RuntimeError, match="read twice"):
        source.load([specs[1], specs[1]], lambda spec, tensor: None)


def test_closing_names_what_was_left_unread(source: TensorSource, specs: tuple[TensorSpec, ...]) -> None:
    source.load(specs[:3], lambda spec, tensor: None)
    with pytest.raises(RuntimeError, match=f"1 tensors asked for but not read: {specs[3].name}"):
        source.close(expected=specs[:4])
    with pytest.raises(RuntimeError, match="1 tensors read but not asked for"):
        source.close(expected=specs[:2])
    source.close(expected=specs[:3])
    source.close()


def test_nothing_is_read_after_closing(source: TensorSource, specs: tuple[TensorSpec, ...]) -> None:
    source.close()
    with pytest.raises(RuntimeError, match="is closed"):
        source.read(specs[0])


def test_a_tensor_of_another_model_is_refused(source: TensorSource, specs: tuple[TensorSpec, ...]) -> None:
    for other in (
        TensorSpec(name="x", shape=(1,), role="embed"),
        dataclasses.replace(specs[0], shape=(1, 2)),
    ):
        with pytest.raises(RuntimeError, match="not a tensor that the checkpoint was opened with"):
            source.read(other)


def test_shapes_and_counts_agree_with_the_specs(source: TensorSource, specs: tuple[TensorSpec, ...]) -> None:
    total_bytes = 0
    for spec in specs:
        tensor = source.read(spec)
        assert tuple(tensor.shape) == spec.shape
        assert tensor.is_contiguous()
        total_bytes += tensor.nbytes
    assert source.read_stats.num_tensors == len(specs)
    assert source.read_stats.num_bytes == total_bytes
