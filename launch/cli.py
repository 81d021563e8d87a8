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

from moe_runtime.env import PREFIX, from_environment, variables_of
from moe_runtime.exit_codes import EXIT_USAGE
from moe_runtime.launch.environment import likely_rank
from moe_runtime.launch.spokesman import may_speak

__all__ = ["last_error", "parse_config", "print_error", "usage_error"]

_Config = TypeVar("_Config")
_errors: list[str] = []


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

        is_alone = _rank() == "0" and os.environ.get("WORLD_SIZE", "1") == "1"
        return parse() if is_alone else _in_one_line(parse)
    except ValueError as error:
        usage_error(str(error))


def usage_error(message: str) -> NoReturn:
    """Print one line and exit with the code for bad usage or configuration."""
    print_error(message)
    raise SystemExit(EXIT_USAGE)


def print_error(message: str) -> None:
    """Print ``error: message`` on standard error; on ranks other than 0 as one line that starts with ``[rank r]``.

    A fault may be on one rank alone, so each may speak; of those with the same to say one does.
    """
    message = message.rstrip()
    _errors.append(message)
    if not may_speak(message):
        return
    text = f"error: {message}\n"
    if _rank() != "0":
        text = f"[rank {_rank()}] error: {'; '.join(message.splitlines())}\n"
    sys.stderr.write(text)  # in one write, so that lines of several ranks do not mix
    sys.stderr.flush()


def last_error() -> str:
    """What ``print_error`` was last given, spoken or not; empty if nothing."""
    return _errors[-1] if _errors else ""


def _rank() -> str:
    return str(likely_rank(os.environ))


def _in_one_line(parse: Callable[[], _Config]) -> _Config:
    """Call tyro without its boxes: what they say becomes one line, and ``--help`` is rank 0's."""
    help_text, shown = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(help_text), contextlib.redirect_stderr(shown):
            return parse()
    except SystemExit as end:
        if _rank() == "0":
            sys.stdout.write(help_text.getvalue())
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
    """Variables of all commands: one environment may serve several of them. Where it has none nothing is loaded: the
    planner does without torch."""
    if not any(name.startswith(PREFIX) for name in os.environ):
        return []
    from moe_runtime.config import (
        AuditConfig,
        GenerateConfig,
        PlanPlacementConfig,
        RecordRoutingConfig,
        ServeConfig,
    )
    from moe_runtime.planner.config import CalibrateConfig, PlanConfig
    from moe_runtime.verify.config import CheckConfig

    kinds = (
        ServeConfig,
        GenerateConfig,
        RecordRoutingConfig,
        PlanPlacementConfig,
        CheckConfig,
        AuditConfig,
        PlanConfig,
        CalibrateConfig,
    )
    return [name for kind in kinds for name in variables_of(kind)]
