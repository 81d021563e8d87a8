"""Everything about expert parallelism on the GPUs of one host, in one call of at most ten minutes.

    python benchmarks/ep8.py --ranks 8 --output benchmarks/results/ep8.json --page benchmarks/results/ep8.md
    python benchmarks/ep8.py --ranks 8 --device cpu --output /tmp/ep8.json --page /tmp/ep8.md

Parts, in the order given: ``check`` (equal bits by every deployment), ``dispatch`` (and the all-reduce, beside the
libraries'), ``engine`` (a full batch in decode, prefill), ``server`` (mixed requests over HTTP). ``ep8_steps.py`` has
what each runs; docs/ep8.md says how to read the page. JSON and page are written again after every step, so a call that
is cut off keeps what it has; the programs' own output is in a folder beside the JSON. NVLink multicast stays off.

Exit code: 0 all that ran passed, 1 something did not, 2 usage.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ep8_page import make_page
from ep8_results import faults
from ep8_steps import PARTS, Setting, plan_steps
from shapes import write_config
from timed_steps import Outcome, TimeBudget, run_steps

import moe_runtime.builtin

FOLDER = Path(__file__).resolve().parent
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def main() -> int:
    """Run the parts. Returns the exit code."""
    options = _options()
    start_s = time.monotonic()
    signal.signal(signal.SIGTERM, _end)
    folder: Path = options.output.resolve().with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    model = write_config(folder / "qwen3-30b-a3b")
    for name in TOKENIZER_FILES:  # of another vocabulary, but a server must have one
        shutil.copy(Path(moe_runtime.builtin.__file__).parent / name, model)
    commit = options.commit or _commit()
    setting = Setting(
        device=options.device, num_ranks=options.ranks, model=model, results=folder, commit=commit
    )
    steps = plan_steps(setting, options.parts)
    document: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": options.device,
        "devices": _devices(options.device),
        "ranks": options.ranks,
        "versions": _versions(),
        "budget_s": options.budget_s,
        "wall_s": 0.0,
        "is_complete": False,
        "steps": [],
    }

    def write(outcome: Outcome | None = None) -> None:
        if outcome is not None:
            document["steps"].append(asdict(outcome))
            words = f"{outcome.state} after {outcome.wall_s:.0f} s" if outcome.limit_s else outcome.state
            print(f"{outcome.part}, {outcome.name}: {words}. {outcome.reason}", flush=True)
        document["is_complete"] = len(document["steps"]) == len(steps)
        document["wall_s"] = round(time.monotonic() - start_s, 1)
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        options.page.write_text(make_page(document), encoding="utf-8")

    write()
    env = MULTICAST_OFF | {"PYTHONPATH": os.pathsep.join([str(FOLDER), *_python_path()])}
    run_steps(steps, TimeBudget(total_s=options.budget_s), write, env=env, start_s=start_s)
    found = faults(document)
    for fault in found:
        print(f"FAULT: {fault}")
    print(f"{options.page}: {len(steps)} steps in {document['wall_s']:.0f} s, {len(found)} faults")
    return 1 if found else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="JSON file")
    parser.add_argument("--page", type=Path, required=True, help="Markdown file")
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"of {','.join(PARTS)}; by default all")
    parser.add_argument("--budget-s", type=float, default=560.0, help="seconds for everything")
    parser.add_argument("--commit", default="", help="recorded; by default what git says")
    return parser.parse_args()


def _parts(text: str) -> tuple[str, ...]:
    parts = tuple(text.split(","))
    if not set(parts) <= set(PARTS) or len(set(parts)) < len(parts):
        raise argparse.ArgumentTypeError(f"({text}) must be different ones of {','.join(PARTS)}")
    return parts


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    """Leave through the end of the step under way, which ends its programs."""
    raise SystemExit(128 + signum)


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _devices(device: str) -> str:
    """What the run has, without starting CUDA in this process."""
    if device == "cpu":
        return f"{os.cpu_count()} cores, {platform.machine()}"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"
    return ", ".join(
        f"{lines.count(line)} x {line.replace(', ', ', driver ')}" for line in dict.fromkeys(lines)
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("moe-runtime", "torch", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
