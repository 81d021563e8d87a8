"""``python -m moe_runtime.server``: the front end process. Started by local rank 0, not by hand.

Reads its configuration from the first line of standard input, which must stay open as long as the parent
lives; writes one line, ``{"zmq": ADDRESS, "port": HTTP_PORT}``, to standard output, and its log to standard
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys

from moe_runtime.errors import CheckpointError
from moe_runtime.exit_codes import EXIT_USAGE
from moe_runtime.log_format import formatter
from moe_runtime.server.config import ServerConfig, decode_config
from moe_runtime.server.front_end import FrontEnd, bind_http

__all__ = ["main"]

MIN_OPEN_FILES = 4096

logger = logging.getLogger(__name__)


def main() -> int:
    """Run the front end. Returns the exit code."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter("text", "front-end"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    _raise_file_limit()
    try:
        config = decode_config(_read_line())
        handler.setFormatter(formatter(config.log_format, "front-end"))
        listener = bind_http(config.host, config.port)
        return asyncio.run(_run(config, listener))
    except (ValueError, OSError, CheckpointError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE


async def _run(config: ServerConfig, listener: socket.socket) -> int:
    return await FrontEnd(config, listener, _announce).run()


def _raise_file_limit() -> None:
    """Every open connection is a file: allow as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if 0 <= soft < MIN_OPEN_FILES:
        logger.warning("at most %d open files are allowed, connections among them; raise ulimit -n", soft)


def _read_line() -> bytes:
    """The first line; read without buffering, so that nothing after it is lost to ``FrontEnd``'s watch."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def _announce(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
