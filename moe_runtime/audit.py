"""``python -m moe_runtime.audit``: which schedules give the same bits on this device; golden digests."""

from __future__ import annotations

import sys

from moe_runtime.launch.audit import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
