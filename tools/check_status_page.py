"""The status page in headless Chromium, over a server on two ranks under load: numbers move and are those of /metrics.

Needs Chromium and its driver (Debian: ``apt-get install chromium chromium-driver``) and ``pip install selenium``, which
are no dependencies of the project. Run from the repository's root::

    python -m tools.check_status_page --screenshots build/status_page

Steps: the page asks for the key and refuses a wrong one; under load numbers move and, once idle, agree with /metrics;
the policy blocked nothing and the console is empty; a killed rank is shown. Every step raises where it fails.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from selenium import webdriver
from selenium.webdriver.common.by import By

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.servers import RunningServer

KEY = "sk-status-page"
HEADERS = {"Authorization": f"Bearer {KEY}"}
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
    "--hide-scrollbars",
)  # fmt: skip
NUM_STREAMS = 12
TIMEOUT_S = 60.0


class KeyedServer(RunningServer):
    """A server that asks for ``KEY``."""

    def info(self) -> dict[str, Any]:
        """``/server_info``."""
        found: dict[str, Any] = (
            httpx.get(f"{self.url}/server_info", headers=HEADERS).raise_for_status().json()
        )
        return found

    def samples(self) -> dict[tuple[str, ...], float]:
        """``/metrics`` by name and labels."""
        text = httpx.get(f"{self.url}/metrics", headers=HEADERS).raise_for_status().text
        return {
            (sample.name.removeprefix("moe_runtime_"), *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


class Page:
    """What the browser shows."""

    def __init__(self, driver: webdriver.Chrome, folder: Path) -> None:
        self.driver = driver
        self.folder = folder

    def text(self, element_id: str) -> str:
        """Visible text of an element."""
        return self.driver.find_element(By.ID, element_id).text

    def value(self, element_id: str) -> float:
        """The number that an element shows, unrounded."""
        return float(self.driver.find_element(By.ID, element_id).get_attribute("data-value") or "nan")

    def is_shown(self, element_id: str) -> bool:
        """Whether it can be seen."""
        return self.driver.find_element(By.ID, element_id).is_displayed()

    def ranks(self) -> list[dict[str, str]]:
        """Fields of each row of the table."""
        script = """return [...document.querySelectorAll("#ranks tr")].map(row => Object.fromEntries(
            [...row.cells].map(cell => [cell.dataset.field, cell.dataset.value ?? cell.textContent])))"""
        found: list[dict[str, str]] = self.driver.execute_script(script)
        return found

    def enter_key(self, key: str) -> None:
        """Fill the form and send it."""
        self.driver.find_element(By.ID, "key").send_keys(key + "\n")

    def picture(self, name: str, *, width: int = 1200, is_dark: bool = False) -> None:
        """A screenshot of the whole page."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.set_window_size(width, 860)
        self.driver.save_screenshot(str(self.folder / f"{name}.png"))

    def console(self) -> list[str]:
        """Messages of the browser since the last call, policy violations among them."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A new Chromium with a profile of its own."""
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
        try:
            yield Page(driver, folder)
        finally:
            driver.quit()


@contextmanager
def load(server: KeyedServer) -> Iterator[threading.Event]:
    """Streams without end; the event, set by the caller or on leaving, lets the last ones finish."""
    stop = threading.Event()

    def stream(number: int) -> None:
        while not stop.is_set():
            body = {
                "model": "builtin",
                "prompt": "Sing, " * (1 + 9 * number),
                "max_tokens": 120,
                "ignore_eos": True,
            }
            httpx.post(
                f"{server.url}/v1/completions", json=body, headers=HEADERS, timeout=TIMEOUT_S
            ).raise_for_status()

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(NUM_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> None:
    """Poll until ``condition`` holds."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.1)


def check_key(page: Page, url: str) -> None:
    """Without a key the page loads and asks; a wrong one is refused; the right one stays in the tab."""
    page.driver.get(url)
    wait_for("the page asks for a key", lambda: page.is_shown("key-form"))
    assert not page.is_shown("content")
    page.picture("key")
    page.enter_key("sk-wrong")
    wait_for("a wrong key is refused", lambda: "did not take" in page.text("key-error"))
    refused = page.console()
    assert refused, "a refusal is in the console"
    assert all("401" in message for message in refused), refused
    page.enter_key(KEY)
    wait_for("numbers are shown", lambda: page.is_shown("content"))
    assert not page.is_shown("key-form")
    assert page.driver.execute_script("return [localStorage.length, document.cookie]") == [0, ""]
    page.driver.refresh()
    wait_for("the tab keeps the key", lambda: page.is_shown("content"))


def check_numbers(page: Page, server: KeyedServer) -> dict[str, Any]:
    """Under load numbers move; once idle they are those of ``/metrics``."""
    assert page.text("phase") == "serving"
    seen: dict[str, set[float]] = {"generation_tokens_total": set(), "num_running": set()}
    with load(server) as stop:
        wait_for("rates are shown", lambda: page.value("generation_rate") > 10)

        def moves() -> bool:
            for name, values in seen.items():
                values.add(page.value(name))
            return len(seen["generation_tokens_total"]) >= 15 and max(seen["num_running"]) == NUM_STREAMS

        wait_for("numbers move", moves)
        wait_for("ranks run", lambda: [rank["phase"] for rank in page.ranks()] == ["running"] * 2)
        wait_for("experts' load", lambda: all(float(rank["routed_pairs"]) > 0 for rank in page.ranks()))
        assert any(float(rank["kv_blocks_used"]) > 0 for rank in page.ranks())
        page.picture("light")
        page.picture("dark", is_dark=True)
        page.picture("narrow", width=500)
        page.picture("light_again")
        rate = page.value("generation_rate")
        stop.set()
    wait_for("the server is idle", lambda: page.value("num_running") == 0)

    def agrees() -> bool:
        samples = server.samples()
        shown = {(name,): page.value(name) for name in ("generation_tokens_total", "prompt_tokens_total")}
        shown["expert_balancedness",] = page.value("expert_balancedness")
        for rank in page.ranks():
            shown["routed_pairs_total", rank["rank"]] = float(rank["routed_pairs"])
            shown["num_requests_running", rank["rank"]] = float(rank["num_running"])
            shown["computed_tokens_total", rank["rank"]] = float(rank["num_computed_tokens"])
        return all(samples[key] == value for key, value in shown.items())

    model = server.info()["resolved"]
    pairs_of_row = model["num_experts_per_tok"] * len(model["moe_layer_ids"])

    def total(name: str) -> float:
        return sum(server.samples()[name, rank] for rank in "01")

    # Counts come about once a second. Exact: every row that ran has its pairs in every layer.
    wait_for(
        "every row's pairs are counted",
        lambda: total("routed_pairs_total") == pairs_of_row * total("computed_tokens_total"),
        10,
    )
    wait_for("the page agrees with /metrics", agrees, 10)
    return {"rate": rate, "rows": total("computed_tokens_total"), "pairs": total("routed_pairs_total")}


def check_lost_rank(page: Page, server: KeyedServer) -> None:
    """A rank that has gone is shown; once one is killed, the page tells of the server's end, which follows at once."""
    status = httpx.get(f"{server.url}/status", headers=HEADERS).raise_for_status().json()
    status["phase"], status["reason"], status["ranks"][1]["phase"] = "failed", "rank 1 has gone", "gone"
    # The server answers so for a moment only, which a poll may miss.
    gone, notice = page.driver.execute_script(
        """showStatus(arguments[0]);
        return [document.querySelector("[data-rank='1'] .bad").textContent, byId("notice").textContent]""",
        status,
    )
    assert (gone, notice) == ("gone", "rank 1 has gone")
    server.signal_rank(1, signal.SIGKILL)
    wait_for("the loss is shown", lambda: page.text("phase") in ("failed", "unreachable"), 20)
    wait_for("nobody answers any more", lambda: page.text("phase") == "unreachable", 30)
    assert "No answer from the server since" in page.text("notice")
    assert page.is_shown("content")
    assert [rank["phase"] for rank in page.ranks()] == ["unknown"] * 2
    page.picture("lost")
    code = server.wait_exit()
    assert code != 0, "a lost rank ends the server with a fault"


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--screenshots", type=Path, default=Path("build/status_page"))
    folder: Path = parser.parse_args().screenshots
    folder.mkdir(parents=True, exist_ok=True)
    server = KeyedServer(2, ["--api-key", KEY])
    try:
        wait_for("the server listens", lambda: server.url or server.process.poll() is not None, 120)
        server.wait_ready()
        with browser(folder) as page:
            check_key(page, server.url)
            found = check_numbers(page, server)
            console = page.console()
            assert not console, console
            check_lost_rank(page, server)
    finally:
        server.close()
    print(json.dumps({"status_page": "as it should be", "screenshots": str(folder), **found}))


if __name__ == "__main__":
    main()
