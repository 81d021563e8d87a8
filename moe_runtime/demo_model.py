"""``python -m moe_runtime.demo_model DIR``: writes a small chat model to try, in Mixtral's layout."""

from __future__ import annotations

import sys

from moe_runtime.launch.demo_model import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
