"""From command line and environment to a configuration, with one clear message on bad input."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import tyro

from moe_runtime.config import AuditConfig, GenerateConfig, ServeConfig
from moe_runtime.env import from_environment, variables_of
from moe_runtime.verify.config import CheckConfig

__all__ = [
    "EXIT_FAULT",
    "EXIT_NO_FIT",
    "EXIT_OK",
    "EXIT_SELF_CHECK",
    "EXIT_USAGE",
    "parse_config",
    "usage_error",
]

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_USAGE = 2
EXIT_NO_FIT = 3
EXIT_SELF_CHECK = 4

_Config = TypeVar("_Config")


def parse_config(
    config_type: type[_Config],
    args: Sequence[str] | None = None,
    *,
    prog: str,
    description: str | None = None,
) -> _Config:
    """Parse flags over the environment over the defaults.

    Exits with code 2 and one message on bad input, with code 0 after ``--help``.

    Args:
        config_type: Frozen dataclass; nested dataclasses contribute their fields as flags of their own.
        args: Arguments; by default those of the process.
        prog: Name shown in the usage line.
        description: Shown by ``--help``; by default the class's docstring.
    """
    is_first_rank = os.environ.get("RANK", "0") == "0"
    quiet = contextlib.nullcontext() if is_first_rank else contextlib.redirect_stderr(io.StringIO())
    try:
        default = from_environment(
            config_type, os.environ, known=_known_variables(), required=tyro.MISSING_NONPROP
        )
        with quiet:
            return tyro.cli(
                config_type,
                args=args,
                default=default,
                prog=prog,
                description=description,
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff),
            )
    except ValueError as error:
        usage_error(str(error))


def usage_error(message: str) -> NoReturn:
    """Print one line, on rank 0 alone, and exit with the code for bad usage or configuration."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_USAGE)


def _known_variables() -> list[str]:
    """Variables of all commands: one environment may serve several of them."""
    kinds = (ServeConfig, GenerateConfig, CheckConfig, AuditConfig)
    return [name for kind in kinds for name in variables_of(kind)]
