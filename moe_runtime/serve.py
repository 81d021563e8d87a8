"""``torchrun --nproc-per-node 8 -m moe_runtime.serve``: an OpenAI-compatible server on expert-parallel ranks.

(torchrun spells it ``--nproc-per-node``; a bare ``--nproc`` is ambiguous to it.) Without torchrun one rank serves.
"""

from __future__ import annotations

import sys

from moe_runtime.launch.serve import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
