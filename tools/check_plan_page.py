"""The planner's HTML in headless Chromium: every panel is drawn and holds its figure's data, and the console is empty.

Needs Chromium and its driver (Debian: ``apt-get install chromium chromium-driver``), ``pip install selenium plotly``.
Run from the repository's root::

    python -m tools.check_plan_page --screenshots build/plan_page

The page is opened from a file without a network; it must load nothing. Every step raises where it fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from selenium import webdriver

sys.path.insert(0, str(Path(__file__).parents[1]))

from moe_runtime.launch.plan_trace import replay
from moe_runtime.planner.answer import answer
from moe_runtime.planner.config import PlanConfig
from moe_runtime.planner.html_report import write_html
from moe_runtime.planner.panels import panels
from moe_runtime.planner.simulation_view import simulation_panels
from tests.model_shapes import DEEPSEEK_V3, QWEN3_30B_A3B

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
MARKS = """const panel = document.getElementById(arguments[0]);
const box = panel.getBoundingClientRect();
return {width: box.width, height: box.height, title: panel.querySelector('.gtitle').textContent,
    traces: panel.data.map(trace => (trace.z ?? trace.y).length),
    points: panel.querySelectorAll('.scatterlayer .trace .points path').length,
    bars: panel.querySelectorAll('.barlayer .trace .point path').length,
    lines: panel.querySelectorAll('.scatterlayer .trace .lines path').length,
    images: panel.querySelectorAll('.heatmaplayer image').length}"""
"""What a panel shows, counted in what is drawn and not in what it was given."""
TRACE = Path(__file__).parents[1] / "tests" / "moe_runtime" / "planner" / "traces" / "mooncake_sample.jsonl"
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fits": (
        QWEN3_30B_A3B,
        {"gpus": "1..64", "request_rate": 100.0, "tpot": 0.03, "expert_load": "zipf:0.6"},
    ),
    "nearest": (DEEPSEEK_V3, {"gpus": "1..4", "gpu": "h100"}),
    "trace": (DEEPSEEK_V3, {"gpus": "16", "trace": TRACE, "ttft": 2.0, "tpot": 0.1, "fail": ("3@1",)}),
}


def check_panel(driver: webdriver.Chrome, name: str, figure: dict[str, Any]) -> dict[str, Any]:
    """Compare what is drawn with the figure's data."""
    found: dict[str, Any] = driver.execute_script(MARKS, name)
    assert found["width"] > 300, (name, found)
    assert found["height"] > 300, (name, found)
    assert found["title"] == figure["layout"]["title"]["text"], (name, found)
    assert found["traces"] == [len(trace.get("z", trace.get("y"))) for trace in figure["data"]], (name, found)
    kinds = {trace["type"] for trace in figure["data"]}
    if all(trace.get("mode") == "lines" for trace in figure["data"]):
        assert found["lines"] == len(figure["data"]), (name, found)
    elif "scatter" in kinds:
        expected = sum(len(trace["x"]) for trace in figure["data"])
        assert 0 < found["points"] <= expected, (name, found)
        assert found["points"] >= 0.9 * expected, (name, found)
    if "bar" in kinds:
        assert found["bars"] == sum(len(trace["x"]) for trace in figure["data"]), (name, found)
    if "heatmap" in kinds:
        assert found["images"] == 1, (name, found)
    return found


def main() -> None:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--screenshots", type=Path, default=Path("build/plan_page"))
    folder: Path = parser.parse_args().screenshots
    folder.mkdir(parents=True, exist_ok=True)
    counted = {}
    with tempfile.TemporaryDirectory() as work:
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for flag in (*FLAGS, f"--user-data-dir={work}/profile"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        driver = webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver"))
        try:
            for case, (config, flags) in CASES.items():
                model = Path(work) / case
                model.mkdir()
                (model / "config.json").write_text(json.dumps(config))
                plan = PlanConfig(model=str(model), **flags)
                found, simulation = (answer(plan), None) if plan.trace is None else replay(plan, plan.trace)
                page = model / "plan.html"
                write_html(found, page, simulation)
                driver.get(page.as_uri())
                driver.set_window_size(1300, 2600)
                drawn = panels(found)
                if simulation is not None:
                    drawn = simulation_panels(simulation) | drawn
                assert drawn, "there is something to draw"
                counted[case] = {name: check_panel(driver, name, figure) for name, figure in drawn.items()}
                driver.save_screenshot(str(folder / f"{case}.png"))
                messages = [entry["message"] for entry in driver.get_log("browser")]
                assert not messages, messages
            requests = [
                json.loads(entry["message"])["message"]["params"]["request"]["url"]
                for entry in driver.get_log("performance")
                if "Network.requestWillBeSent" in entry["message"] and '"request"' in entry["message"]
            ]
            fetched = [url for url in requests if url.startswith(("http:", "https:", "ws:"))]
            assert not fetched, fetched
        finally:
            driver.quit()
    print(json.dumps({"plan_page": "as it should be", "screenshots": str(folder), "panels": counted}))


if __name__ == "__main__":
    main()
