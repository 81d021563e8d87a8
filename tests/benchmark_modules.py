"""Modules of ``benchmarks/``, which is no package, for tests of what benchmarks measure with."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["load_benchmark_module"]

FOLDER = str(Path(__file__).parents[1] / "benchmarks")


def load_benchmark_module(name: str) -> ModuleType:
    """``benchmarks/<name>.py``, under the name it has for its neighbours there."""
    if FOLDER not in sys.path:
        sys.path.append(FOLDER)
    return importlib.import_module(name)
