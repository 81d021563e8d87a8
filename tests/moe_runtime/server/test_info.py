"""Models, version, server info."""

from __future__ import annotations

import moe_runtime
from tests.moe_runtime.server.fake_rank import write_checkpoint


def test_models(server):
    listed = server.http.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("m", "model", 4096)
    assert server.http.get("/v1/models/m").json() == model
    response = server.http.get("/v1/models/org/other")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_version(server):
    assert server.http.get("/version").json() == {"version": moe_runtime.__version__}


def test_server_info(start_server, tmp_path):
    model_dir = write_checkpoint(tmp_path / "m", {"temperature": 0.5, "top_k": 4})
    server = start_server(api_key="very-secret", model_dir=str(model_dir))
    response = server.http.get("/server_info")
    assert "very-secret" not in response.text
    info = response.json()
    assert (info["phase"], info["world_size"], info["invariance"]) == ("serving", 2, "topology")
    assert info["system_fingerprint"] == "fp-1"
    assert info["dispatcher"] == "symmetric"
    assert info["limits"] == {
        "vocab_size": 259,
        "max_model_len": 4096,
        "max_kv_tokens": 8192,
        "eos_token_ids": [258],
    }
    assert info["sampling_defaults"]["temperature"] == 0.5
    assert [(rank["rank"], rank["pid"], rank["info"]) for rank in info["ranks"]] == [
        (0, 1000, {"device": "fake", "dispatcher": "symmetric"}),
        (1, 1001, {"device": "fake", "dispatcher": "symmetric"}),
    ]
    assert info["ranks"][0]["stats"]["num_kv_blocks"] in (0, 128)
    assert [(rank["phase"], rank["device"]) for rank in info["ranks"]] == [("idle", "fake")] * 2
    assert info["ranks"][0]["num_running"] == info["ranks"][0]["kv_blocks_used"] == 0
    # The checkpoint's sampling defaults reach the engine.
    server.complete(max_tokens=1)
    (added,) = [m for rank in server.ranks.ranks for m in rank.received if hasattr(m, "request")]
    assert (added.request.params.temperature, added.request.params.top_k) == (0.5, 4)
