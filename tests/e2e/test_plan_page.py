"""The planner's page in a browser: ``tools/check_plan_page.py`` where Chromium, its driver and selenium are there."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_panel_of_the_page_shows_its_data(tmp_path: Path) -> None:
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    missing += [name for name in ("selenium", "plotly") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "tools.check_plan_page", "--screenshots", str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("*.png")), "what was looked at is kept"
