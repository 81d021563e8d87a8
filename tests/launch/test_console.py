"""The moe-runtime command."""

from __future__ import annotations

import importlib

import pytest

from moe_runtime import __version__
from moe_runtime.launch.console import COMMANDS, main, module_of


def test_every_command_has_a_program() -> None:
    for name in COMMANDS:
        assert callable(importlib.import_module(f"moe_runtime.launch.{module_of(name)}").main)
        assert callable(importlib.import_module(f"moe_runtime.{module_of(name)}").main)


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"]) == 2
    assert "srve is no command" in capsys.readouterr().err
