"""A template of a stranger in a server."""

from __future__ import annotations

import concurrent.futures

import httpx

from tests.moe_runtime.server.fake_rank import write_checkpoint


def test_a_template_without_end_is_a_400_and_holds_up_nobody(start_server, tmp_path):
    """Other requests are answered while it runs to its bound."""
    folder = write_checkpoint(tmp_path)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(endless)
    server = start_server(model_dir=str(folder))
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        refused = pool.submit(httpx.post, f"{server.url}/v1/chat/completions", json=body, timeout=60)
        num_answers = 0
        while not refused.done():
            assert server.complete(max_tokens=1)["choices"]
            num_answers += 1
    assert num_answers > 3
    assert refused.result().status_code == 400
    assert refused.result().json()["error"]["param"] == "messages"
    assert "it takes more than" in refused.result().json()["error"]["message"]
