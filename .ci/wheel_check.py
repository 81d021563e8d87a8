"""Import every module of the installed wheel, from the wheel and from nowhere else.

Usage: wheel_check.py DIST_DIR SITE_DIR. The contents of the wheel are compared with the folders on disk by
tests/test_layout_rules.py; this shows that what was packed also runs.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

# May be absent on a machine without a GPU; a module that needs one of them need not import there.
OPTIONAL = {"triton", "deep_ep", "llguidance"}


def main(dist_dir: str, site_dir: str) -> int:
    """Print one line per failed import; return the number of failures, at most 1."""
    (wheel,) = Path(dist_dir).glob("moe_runtime-*.whl")
    site = Path(site_dir).resolve()
    sys.path.insert(0, str(site))
    package = importlib.import_module("moe_runtime")
    failures, num_imported = [], 0
    for info in pkgutil.walk_packages(package.__path__, "moe_runtime."):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if error.name in OPTIONAL:
                continue
            failures.append(f"{info.name}: {error}")
            continue
        except Exception as error:
            failures.append(f"{info.name}: {error!r}")
            continue
        num_imported += 1
        if not Path(module.__file__ or "").resolve().is_relative_to(site):
            failures.append(f"{info.name}: loaded from {module.__file__}, not from the wheel")
    for failure in failures:
        print(failure)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {num_imported} modules imported")
    return int(bool(failures) or num_imported == 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
