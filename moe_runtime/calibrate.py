"""``python -m moe_runtime.calibrate``: times kernels and transports here, for ``moe_runtime.plan --gpu FILE``."""

from __future__ import annotations

import sys

from moe_runtime.launch.calibrate import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
