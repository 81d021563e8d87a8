"""``python -m moe_runtime.generate``: offline generation, JSON lines in, JSON lines out; also under torchrun."""

from __future__ import annotations

import sys

from moe_runtime.launch.generate import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
