"""From command line and environment to a configuration, with one clear message on bad input."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import tyro

from moe_runtime.config import AuditConfig, GenerateConfig, ServeConfig
from moe_runtime.env import from_environment, variables_of
from moe_runtime.launch.environment import likely_rank
from moe_runtime.verify.config import CheckConfig

__all__ = [
    "EXIT_FAULT",
    "EXIT_NO_FIT",
    "EXIT_OK",
    "EXIT_SELF_CHECK",
    "EXIT_USAGE",
    "parse_config",
    "print_error",
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

    Exits with code 2 and one message on bad input, with code 0 after ``--help``. Ranks other than 0 say it in one line.

    Args:
        config_type: Frozen dataclass; nested dataclasses contribute their fields as flags of their own.
        args: Arguments; by default those of the process.
        prog: Name shown in the usage line.
        description: Shown by ``--help``; by default the class's docstring.
    """
    try:
        default = from_environment(
            config_type, os.environ, known=_known_variables(), required=tyro.MISSING_NONPROP
        )

        def parse() -> _Config:
            return tyro.cli(
                config_type,
                args=args,
                default=default,
                prog=prog,
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
            )

        return parse() if _rank() == "0" else _in_one_line(parse)
    except ValueError as error:
        usage_error(str(error))


def usage_error(message: str) -> NoReturn:
    """Print one line and exit with the code for bad usage or configuration."""
    print_error(message)
    raise SystemExit(EXIT_USAGE)


def print_error(message: str) -> None:
    """Print ``error: message`` on standard error; on ranks other than 0 as one line that starts with ``[rank r]``.

    Every rank speaks: a fault may be on one of them alone.
    """
    text = f"error: {message}\n"
    if _rank() != "0":
        text = f"[rank {_rank()}] error: {'; '.join(message.splitlines())}\n"
    sys.stderr.write(text)  # in one write, so that lines of several ranks do not mix
    sys.stderr.flush()


def _rank() -> str:
    return str(likely_rank(os.environ))


def _in_one_line(parse: Callable[[], _Config]) -> _Config:
    """Call tyro without its boxes: what they say becomes one line, and nothing is left of ``--help``."""
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(shown):
            return parse()
    except SystemExit as end:
        if end.code:
            usage_error(_without_box(shown.getvalue()))
        raise


def _without_box(text: str) -> str:
    """The sentence inside a box of tyro's, without its title and its reference to the help text."""
    plain = re.sub(r"\x1b\[[0-9;]*m|[\u2500-\u257f]", "", text)
    lines = [line.strip(" |+") for line in plain.splitlines()[1:]]
    sentence = " ".join(line for line in lines if line.strip("-"))
    return " ".join(sentence.partition("For full helptext")[0].split())


def _known_variables() -> list[str]:
    """Variables of all commands: one environment may serve several of them."""
    kinds = (ServeConfig, GenerateConfig, CheckConfig, AuditConfig)
    return [name for kind in kinds for name in variables_of(kind)]
