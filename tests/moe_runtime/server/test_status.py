"""The status page's files and the numbers behind it; what a browser makes of them: tools/check_status_page.py."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from importlib import resources

import httpx
import pytest

from moe_runtime.server.status import CONTENT_SECURITY_POLICY
from tests.moe_runtime.server.conftest import RunningServer, wait_until

FOLDER = resources.files("moe_runtime.server") / "page"
OWN = {"status.css", "status.js", "status.svg", "status", "docs", "openapi.json"}
ADDRESS = re.compile(r"(?:src|href)=\"([^\"]+)\"|fetch\(\"([^\"]+)\"|url\(([^)]+)\)")
FILES = {
    "/": "text/html",
    "/status.css": "text/css",
    "/status.js": "text/javascript",
    "/status.svg": "image/svg+xml",
}


@pytest.fixture(scope="module")
def keyed(make_config):
    running = RunningServer(make_config(api_key="sk-of-the-page"))
    yield running
    running.close()


@pytest.mark.parametrize("path", FILES)
def test_files_need_no_key_and_forbid_what_is_not_theirs(keyed, path):
    response = httpx.get(keyed.url + path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(FILES[path])
    policy = response.headers["content-security-policy"]
    assert policy == CONTENT_SECURITY_POLICY
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"


def test_the_page_has_nothing_that_its_policy_forbids():
    page = (FOLDER / "status.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*\ssrc=)|https?:", page)
    for name in ("status.html", "status.css", "status.js"):
        addresses = ADDRESS.findall((FOLDER / name).read_text())
        assert {"".join(address) for address in addresses} <= OWN
    assert "innerHTML" not in (FOLDER / "status.js").read_text(), "names come from outside"


def test_every_element_that_the_script_names_is_in_the_page():
    page, script = (FOLDER / "status.html").read_text(), (FOLDER / "status.js").read_text()
    ids = set(re.findall(r"byId\(\"([\w-]+)\"\)", script))
    assert len(ids) > 8
    assert ids <= set(re.findall(r" id=\"([\w-]+)\"", page))


def test_numbers_need_the_key(keyed):
    assert httpx.get(keyed.url + "/status").status_code == 401
    response = keyed.http.get("/status")
    assert response.headers["cache-control"] == "no-store"
    assert "sk-of-the-page" not in response.text


def test_numbers_are_those_of_requests_and_metrics(start_server):
    server = start_server()
    before = server.http.get("/status").json()
    assert (before["phase"], before["reason"], before["model"]) == ("serving", None, "m")
    assert (before["invariance"], before["system_fingerprint"]) == ("topology", "fp-1")
    server.complete(max_tokens=7)
    after = server.http.get("/status").json()
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == 7
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == len("Hello")
    assert after["time_s"] > before["time_s"]
    metrics = server.http.get("/metrics").text
    assert f"moe_runtime_generation_tokens_total {after['generation_tokens_total']}.0" in metrics


def test_open_requests_are_counted_while_they_are_open(start_server):
    server = start_server()
    server.ranks.hold.set()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(server.complete, max_tokens=3) for _ in range(3)]
        wait_until(lambda: server.http.get("/status").json()["num_open_requests"] == 3)
        server.ranks.hold.clear()
        assert [len(call.result()["choices"]) for call in calls] == [1] * 3
    assert server.http.get("/status").json()["num_open_requests"] == 0


def test_a_server_that_starts_says_so(start_server):
    server = start_server(with_ranks=False)
    status = server.http.get("/status").json()
    assert status["phase"] == "starting"
    assert status["reason"] == "starting: 0 of 2 ranks are ready"
    assert [rank["phase"] for rank in status["ranks"]] == ["starting"] * 2
    assert status["num_running"] == 0
