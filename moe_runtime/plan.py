"""``python -m moe_runtime.plan``: how many GPUs a model needs, in which layout, and what invariance costs."""

from __future__ import annotations

import sys

from moe_runtime.launch.plan import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
