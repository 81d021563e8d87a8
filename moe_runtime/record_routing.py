"""``python -m moe_runtime.record_routing``: records the experts of a file of prompts; also under torchrun."""

from __future__ import annotations

import sys

from moe_runtime.launch.record_routing import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
