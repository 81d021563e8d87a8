"""The configuration document."""

from __future__ import annotations

import pytest

from moe_runtime.server.config import decode_config, encode_config


def test_a_config_survives_its_encoding(make_config):
    config = make_config(
        api_key="k",
        expert_placement={"slots_per_rank": [1]},
        info={"a": 1, "b": [True, None]},
        request_timeout_s=1.5,
    )
    line = encode_config(config)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_config(line) == config


def test_the_key_is_not_printed(make_config):
    assert "secret" not in repr(make_config(api_key="secret"))


@pytest.mark.parametrize("line", [b"", b"{}", b"[]", b"not json", b'{"host": 5}'])
def test_anything_else_is_a_value_error(line):
    with pytest.raises(ValueError, match="no server configuration on standard input"):
        decode_config(line)


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 70000},
        {"served_model_name": ""},
        {"world_size": 0},
        {"tp": 0},
        {"world_size": 3, "tp": 2},
        {"api_key": ""},
        {"heartbeat_timeout_s": 0.0},
        {"slow_step_s": 0.0},
        {"step_timeout_s": -1.0},
        {"drain_timeout_s": -1.0},
        {"request_timeout_s": 0.0},
        {"max_body_bytes": 0},
        {"max_num_seqs": 0},
        {"max_queued_seqs": -1},
        {"max_queued_tokens": -1},
        {"max_unread_bytes": 0},
        {"reader_timeout_s": 0.0},
    ],
)
def test_bad_values_are_named(make_config, fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        make_config(**fields)
