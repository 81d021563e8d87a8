"""Storms over the server at two ranks with the built-in model.

    python tools/storm.py disconnects            500 clients that leave in every phase
    python tools/storm.py streams                1,000 streams at once

``disconnects``: no request, block or task is left behind, and fixed requests keep their digests before, during and
after. ``streams``: each stream is complete, in order, equal to the answer that the same request gets alone, and has its
usage. Exit code: 0 all of it holds, 1 something does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from load_client import LoadClient
from load_server import load_server
from load_storm import disconnect_storm, many_streams

# Few places, so that most clients queue; small steps, so that prompts are run in many chunks.
FEW_PLACES = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64")
ROOM_FOR_ALL = ("--max-num-seqs", "512", "--max-num-batched-tokens", "1024")


def main() -> int:
    """Run one storm and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("storm", choices=("disconnects", "streams"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--number", type=int)
    options = parser.parse_args()
    flags = FEW_PLACES if options.storm == "disconnects" else ROOM_FOR_ALL
    with load_server(options.ranks, *flags) as server:
        client = LoadClient(server.url)
        result: dict[str, Any]
        if options.storm == "disconnects":
            result = asyncio.run(disconnect_storm(client, options.number or 500))
            is_right = result["digests_after_are_equal"] and set(result["probes_during"]) == {"equal"}
        else:
            number = options.number or 1000
            result = asyncio.run(many_streams(client, number))
            is_right = result["verdicts"] == {"right": number}
    print(json.dumps(result, indent=1))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
