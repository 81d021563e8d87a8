"""Golden digests: sha256 of canonical outputs on fixed inputs, committed per architecture.

A digest that moves means that a compiler, a library or an edit changed bits that requests were promised. Then either
the change is undone, or it is accepted: raise ``NUMERICS_VERSION`` (moe_runtime/engine/model_loader.py), so that the
fingerprint of every model changes, and write the digests again (``moe-runtime audit --golden write``) in the same
commit. Digests of an op, shape or machine that is new are added without a new version.

A file ``golden/<architecture>.json`` maps an environment to digests by "op shape dtype". A GPU architecture (``sm90``)
is one environment. CPUs differ more: their one file, ``cpu.json``, has an entry per ``cpu_key``.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch

from moe_runtime.kernels.activation import swiglu
from moe_runtime.kernels.attention import BLOCK_SIZE, make_attention_plan, paged_attention
from moe_runtime.kernels.audit_inputs import KINDS, AuditInputs
from moe_runtime.kernels.combine import combine_slots_fp32
from moe_runtime.kernels.gemm import linear_fp32, pack_weight
from moe_runtime.kernels.rms_norm import rms_norm
from moe_runtime.kernels.rope import apply_rope
from moe_runtime.kernels.router import route
from moe_runtime.kernels.sampling import gumbel_noise
from moe_runtime.kernels.softmax import log_softmax

__all__ = [
    "GOLDEN_FOLDER",
    "compare_golden",
    "cpu_digests",
    "cpu_key",
    "digest",
    "read_golden",
    "write_golden",
]

GOLDEN_FOLDER = Path(__file__).parent / "golden"

_CPU_GEMMS = ((256, 192, 1), (384, 128, 2), (256, 16, 8))  # K, N, parts
_NUM_ROWS = 21


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """sha256 over dtypes, shapes and bits."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
        flat = tensor.detach().cpu().contiguous().view(-1)
        state.update(flat.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def read_golden(architecture: str, environment: str, folder: Path = GOLDEN_FOLDER) -> dict[str, str] | None:
    """Committed digests of an environment, or None where there are none."""
    path = folder / f"{architecture}.json"
    if not path.exists():
        return None
    entries: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="ascii"))
    return entries.get(environment)


def write_golden(
    architecture: str, environment: str, digests: Mapping[str, str], folder: Path = GOLDEN_FOLDER
) -> Path:
    """Add or replace digests of an environment; others stay. Returns the file."""
    path = folder / f"{architecture}.json"
    entries: dict[str, dict[str, str]] = json.loads(path.read_text(encoding="ascii")) if path.exists() else {}
    entries[environment] = {**entries.get(environment, {}), **digests}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="ascii")
    return path


def compare_golden(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """A sentence for every digest that moved; names that only one side has are no difference."""
    return [
        f"{name}: {actual[name][:12]} is not the committed {value[:12]}"
        for name, value in sorted(expected.items())
        if name in actual and actual[name] != value
    ]


def cpu_key() -> str:
    """What the CPU path's bits may depend on: instruction set, machine, processor model, libraries of torch."""
    libraries = [
        name
        for name, found in (
            ("mkl", torch.backends.mkl.is_available()),
            ("onednn", torch.backends.mkldnn.is_available()),
        )
        if found
    ]
    capability = torch.backends.cpu.get_cpu_capability()
    return " ".join([platform.machine(), capability, *_processor(), *libraries])


def cpu_digests() -> dict[str, str]:
    """Digests of the CPU ops' canonical outputs."""
    found: dict[str, str] = {}
    for k, n, parts in _CPU_GEMMS:
        make = AuditInputs(f"cpu dense N{n} K{k} P{parts}", "cpu")
        weight = pack_weight(make.values("w", (n, k), torch.float32), parts)
        rows = [make.values("x", (_NUM_ROWS, k), torch.float32, kind) for kind in KINDS]
        found[f"{make.name[4:]} float32"] = digest([linear_fp32(x, weight) for x in rows])
    make = AuditInputs("cpu rows", "cpu")
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        x = make.values("x", (_NUM_ROWS, 2 * 192), dtype, "heavy_tailed")
        found[f"rms_norm H384 {name}"] = digest([rms_norm(x, torch.ones(384), 1e-6)])
        found[f"swiglu W192 {name}"] = digest([swiglu(x)])
        found[f"attention H4/2x64 {name}"] = digest([_attend(make, dtype)])
        heads = make.values("heads", (_NUM_ROWS, 4, 64), dtype)
        angles = make.values("angles", (2, _NUM_ROWS, 32), torch.float32)
        found[f"rope D64 {name}"] = digest([apply_rope(heads, angles[0], angles[1])])
    slots = make.values("slots", (_NUM_ROWS, 8, 64), torch.float32, "cancelling")
    found["combine K8 H64 float32"] = digest([combine_slots_fp32(slots)])
    logits = make.values("logits", (_NUM_ROWS, 128), torch.float32)
    for norm in (True, False):
        found[f"router E128 K8 norm={norm} float32"] = digest(route(logits, 8, norm))
    logits = make.values("wide logits", (_NUM_ROWS, 5003), torch.float32)
    found["log_softmax V5003 float32"] = digest([log_softmax(logits)])
    noise = gumbel_noise(2**63 + 5, 2**40 + 3, np.arange(5003))
    found["gumbel_noise V5003 float64"] = digest([torch.from_numpy(noise)])
    return found


def _attend(make: AuditInputs, dtype: torch.dtype) -> torch.Tensor:
    """The last rows of one sequence and one row of another."""
    num_keys = 5 * BLOCK_SIZE + 9
    num_blocks = -(-num_keys // BLOCK_SIZE)
    shape = (num_blocks, 2, BLOCK_SIZE, 64)
    q = make.values("q", (_NUM_ROWS + 1, 4, 64), dtype)
    k = make.values("k", shape, dtype)
    v = make.values("v", shape, dtype, "heavy_tailed")
    table = list(range(num_blocks))
    plan = make_attention_plan([_NUM_ROWS, 1], [num_keys - _NUM_ROWS, 130], [table, table], 2)
    return paged_attention(q, k, v, plan, 64**-0.5, None)


def _processor() -> list[str]:
    """Vendor, family and model, on which MKL bases its choice of kernels; nothing where the system hides them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    known = {name.strip(): value.strip() for name, value in fields.items()}
    found = [known[name] for name in ("vendor_id", "cpu family", "model") if name in known]
    return ["/".join(found)] if found else []
