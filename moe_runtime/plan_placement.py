"""``python -m moe_runtime.plan_placement``: from a load of experts to a placement file."""

from __future__ import annotations

import sys

from moe_runtime.launch.plan_placement import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
