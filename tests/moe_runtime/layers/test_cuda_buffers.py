"""Buffers of a step: views of fixed addresses, and a record of routing for every layer."""

from __future__ import annotations

import torch

from moe_runtime.models.registry import load_model_config
from tests.gpu_engine import write_gpu_checkpoint

from moe_runtime.layers.cuda_buffers import MAX_DECODE_ROWS, Buffers, room_of, rows_of  # isort: skip


def buffers(tmp_path) -> Buffers:
    config = load_model_config(write_gpu_checkpoint(tmp_path))
    return Buffers(config, 300, torch.bfloat16, torch.device("cpu"))


def test_rows_are_views_of_one_address(tmp_path):
    made = buffers(tmp_path)
    few, many = made.rows(3), made.rows(300)
    assert few.residual.shape == (3, 64)
    for name in ("residual", "normed", "qkv", "q", "attention", "branch", "parts", "router_logits"):
        assert getattr(few, name).data_ptr() == getattr(many, name).data_ptr()
    assert few.parts.shape[0] == 3
    assert many.parts.shape[0] == min(300, MAX_DECODE_ROWS)


def test_every_layer_has_a_record_for_every_row(tmp_path):
    made = buffers(tmp_path)
    assert made.routing.shape == (2, 300, 2)
    assert made.routing.dtype == torch.int16


def test_a_view_knows_the_room_behind_it(tmp_path):
    made = buffers(tmp_path)
    normed = made.rows(5).normed
    assert room_of(normed) == 300
    assert room_of(made.normed[100:105]) == 200
    wider = rows_of(normed, 16)
    assert wider.shape == (16, 64)
    assert wider.data_ptr() == normed.data_ptr()
