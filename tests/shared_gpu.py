"""Ranks that share one GPU, for tests where there are fewer than ranks; as a program, what runs another one's ranks so.

Kernels of several processes take turns on a GPU, also those that wait for a peer's flag, so everything that goes
through symmetric memory works as between GPUs, only slowly; a copy between two ranks stays on the device. NCCL refuses
ranks that share a GPU. Nothing is measured in this form.

    torchrun --nproc-per-node 8 tests/shared_gpu.py -m moe_runtime.check --device cuda ...
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

__all__ = ["share_gpu"]

_shared: list[int] = []


def share_gpu(num_ranks: int) -> None:
    """Let this process take its share of a GPU for a GPU of its own, once; before its first symmetric memory.

    Args:
        num_ranks: On the GPU.
    """
    if _shared:
        return
    _shared.append(num_ranks)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    import torch

    from moe_runtime.comm import symmetric_memory

    mem_get_info, whereabouts = torch.cuda.mem_get_info, symmetric_memory._whereabouts

    def share(*args: Any) -> tuple[int, int]:
        free_bytes, total_bytes = mem_get_info(*args)
        return free_bytes // num_ranks, total_bytes

    def apart(*args: Any) -> tuple[list[str], list[str]]:
        hosts, uuids = whereabouts(*args)
        return hosts, [f"{uuid} of rank {rank}" for rank, uuid in enumerate(uuids)]

    torch.cuda.mem_get_info, symmetric_memory._whereabouts = share, apart


def main() -> None:
    """Run ``-m MODULE`` or a file, with its flags, as a rank on the first GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    folder = str(Path(__file__).parent)
    sys.path[:] = [path for path in sys.path if path != folder]  # there is a folder moe_runtime in it
    share_gpu(int(os.environ["LOCAL_WORLD_SIZE"]))
    program, *flags = sys.argv[1:]
    if program == "-m":
        program, *flags = flags
        sys.argv = [program, *flags]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *flags]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
