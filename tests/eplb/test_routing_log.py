"""Routing logs: what was written is read, and no cut or change of a byte goes unnoticed."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.eplb.routing_log import (
    MAGIC,
    RoutingLogHeader,
    RoutingLogWriter,
    iter_routing_log,
    read_routing_header,
    routing_log_counts,
)

HEADER = RoutingLogHeader(moe_layer_ids=(1, 3), num_logical_experts=6, num_topk=3, fingerprint="fp_x")


def records(header: RoutingLogHeader = HEADER, lengths: tuple[int, ...] = (5, 0, 1, 9)) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    layers, topk = header.shape
    return [
        rng.permuted(
            np.broadcast_to(np.arange(header.num_logical_experts), (n, layers, header.num_logical_experts)),
            axis=2,
        )[:, :, :topk]
        for n in lengths
    ]


def log_of(header: RoutingLogHeader, chosen: list[np.ndarray]) -> bytes:
    file = io.BytesIO()
    writer = RoutingLogWriter(file, header)
    for ids in chosen:
        writer.add(ids)
    writer.finish()
    assert (writer.num_records, writer.num_tokens) == (len(chosen), sum(map(len, chosen)))
    return file.getvalue()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "log").write_bytes(log_of(HEADER, records()))
    return tmp_path / "log"


@pytest.mark.parametrize("num_experts", [6, 256, 257, 1 << 16])
def test_what_was_written_is_read(tmp_path, num_experts):
    header = replace(HEADER, num_logical_experts=num_experts)
    chosen = records(header, (3, 0, 2))
    path = tmp_path / "log"
    path.write_bytes(log_of(header, chosen))
    assert read_routing_header(path) == header
    found = list(iter_routing_log(path))
    assert [ids.tolist() for ids in found] == [ids.tolist() for ids in chosen]
    assert found[0].dtype.itemsize == (1 if num_experts <= 256 else 2)


def test_a_token_takes_as_many_bytes_as_it_has_ids(tmp_path):
    header = RoutingLogHeader(
        moe_layer_ids=tuple(range(48)), num_logical_experts=128, num_topk=8, fingerprint="fp_x"
    )
    assert len(log_of(header, records(header, (100,)))) < 100 * 48 * 8 + 500


def test_every_cut_and_every_changed_byte_is_noticed(path):
    """Control: the file as it is can be read."""
    data = path.read_bytes()
    whole = [ids.tolist() for ids in iter_routing_log(path)]
    for end in range(len(data)):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match=r"routing log \S+: "):
            list(iter_routing_log(path))
    for at in range(len(data)):
        for bit in (1, 128):
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            with pytest.raises(ValueError, match=r"routing log \S+: "):
                list(iter_routing_log(path))
    path.write_bytes(data + b"\0")
    with pytest.raises(ValueError, match="must end after its end record"):
        list(iter_routing_log(path))
    path.write_bytes(data)
    assert [ids.tolist() for ids in iter_routing_log(path)] == whole


def test_counts_are_those_of_all_tokens_in_their_order(path):
    tokens = np.concatenate(records())
    for num_buckets in (1, 2, 4, 15, 99):
        counts = routing_log_counts(path, num_buckets)
        assert counts.shape == (min(num_buckets, len(tokens)), 2, 6)
        per_bucket = counts.sum(axis=2)
        assert per_bucket.max() - per_bucket.min() <= 3
        expected = np.stack([np.bincount(tokens[:, layer].ravel(), minlength=6) for layer in range(2)])
        assert counts.sum(axis=0).tolist() == expected.tolist()
    first = np.bincount(tokens[:7, 0].ravel(), minlength=6)
    assert routing_log_counts(path, 2)[0, 0].tolist() == first.tolist()


def test_an_empty_log_has_no_load(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(log_of(HEADER, []))
    assert routing_log_counts(path).tolist() == np.zeros((1, 2, 6)).tolist()


def test_what_is_no_log_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        read_routing_header(tmp_path / "none")
    for data, message in (
        (b"", f"must start with {MAGIC.decode()}"),
        (b"PK\3\4 something", "must start with"),
        (MAGIC + b"\xff\xff\xff\x7f", "header .* must be at most"),
    ):
        (tmp_path / "log").write_bytes(data)
        with pytest.raises(ValueError, match=message):
            read_routing_header(tmp_path / "log")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layer_ids": ()}, "moe_layer_ids"),
        ({"moe_layer_ids": (2, 1)}, "ascending"),
        ({"num_topk": 7}, r"num_topk \(7\) must be an integer in \[1, 6\]"),
        ({"num_logical_experts": 1 << 17}, "num_logical_experts"),
        ({"fingerprint": None}, "fingerprint"),
    ],
)
def test_impossible_headers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(HEADER, **changes)


def test_ids_of_another_model_are_refused():
    writer = RoutingLogWriter(io.BytesIO(), HEADER)
    with pytest.raises(ValueError, match=r"ids \(shape \(1, 2, 4\)\)"):
        writer.add(np.zeros((1, 2, 4), dtype=np.int64))
    with pytest.raises(
        ValueError, match=r"ids \(0 to 6\) must be logical experts below num_logical_experts \(6\)"
    ):
        writer.add(np.array([[[0, 1, 6], [0, 1, 2]]]))
