"""``torchrun --nproc-per-node 8 -m moe_runtime.check``: proves that results depend on nothing but the request.

Without torchrun one rank checks itself; any number of ranks must print the same digest.
"""

from __future__ import annotations

import sys

from moe_runtime.launch.check import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
