"""What a check found: per axis, per verdict, as a whole; as a table and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_runtime.exit_codes import EXIT_MISSED_CONTROL, EXIT_OK, EXIT_SELF_CHECK
from moe_runtime.kernels.schedules import Control
from moe_runtime.verify.axes import Verdict
from moe_runtime.verify.compare import Difference

__all__ = ["AxisResult", "CheckExit", "CheckReport"]


class CheckExit(IntEnum):
    """Exit codes of the check: those of every command, read as its outcomes."""

    EQUAL = EXIT_OK
    DIFFERENT = EXIT_SELF_CHECK
    CONTROL_NOT_NOTICED = EXIT_MISSED_CONTROL


@dataclass(slots=True, kw_only=True)
class AxisResult:
    """What one axis found.

    Attributes:
        name: The axis.
        verdict: What it proves.
        num_runs: Batches run.
        num_cases: Outputs compared with their reference.
        num_requests: Different requests among them, by name and length: as many unique outputs there should be.
        num_unique_outputs: Different outputs, references included.
        num_differing: Outputs unlike their reference.
        first_difference: The first of them.
        num_forced_tokens: Positions compared with the reference tokens forced; 0 where nothing differed.
        num_forced_differing: Those of them whose logprobs differ.
        num_preemptions: Over all ranks.
        num_cached_tokens: Tokens that prefix caches spared computing.
        num_accepted_drafts, num_rejected_drafts: Over all ranks.
        wall_s: Seconds.
        proves_nothing: Why the axis could not have shown a difference, where so.
        not_applicable: Why there was nothing to run, where so; such an axis neither passes nor fails.
        deployments: Other deployments that ran, by name, and how many of their outputs are unlike their reference.
        not_run: Those that could not be there, and why.
        note: What else to know of what ran.
    """

    name: str
    verdict: Verdict
    num_runs: int = 0
    num_cases: int = 0
    num_requests: int = 0
    num_unique_outputs: int = 0
    num_differing: int = 0
    first_difference: Difference | None = None
    num_forced_tokens: int = 0
    num_forced_differing: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_accepted_drafts: int = 0
    num_rejected_drafts: int = 0
    wall_s: float = 0.0
    proves_nothing: str | None = None
    not_applicable: str | None = None
    deployments: dict[str, int] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def passed(self) -> bool:
        """All outputs equal their reference, and a difference could have been seen."""
        return self.num_differing == 0 and self.proves_nothing is None and self.not_applicable is None

    @property
    def finding(self) -> str:
        """One sentence; then which other deployments ran, and which did not."""
        text = self.not_applicable or self.proves_nothing or "equal"
        if self.first_difference is not None:
            text = str(self.first_difference)
        if self.num_forced_tokens:
            text += (
                f"; with the reference tokens forced, {self.num_forced_differing} of {self.num_forced_tokens} "
                f"positions differ"
            )
        different = [name for name, num_differing in self.deployments.items() if num_differing]
        equal = [name for name, num_differing in self.deployments.items() if not num_differing]
        if different:
            text += f"; different on {', '.join(different)}"
        if equal:
            text += f"{'; equal' if text != 'equal' else ''} on {', '.join(equal)}"
        if self.note:
            text += f"; {self.note}"
        return text + "".join(f"; {name} not run: {reason}" for name, reason in self.not_run.items())


@dataclass(slots=True, kw_only=True)
class CheckReport:
    """What a check found.

    Attributes:
        facts: Model, fingerprint, ranks and settings, for the reader.
        digest: SHA-256 over all outputs of the reference batch.
        control: Tree that was switched off.
        expected_digest: Digest asked for.
        axes: Results in the order of the runs.
        wall_s: Seconds of all runs, loading left out.
        is_complete: All axes asked for have run.
    """

    facts: dict[str, str | int]
    digest: str
    control: Control = Control.NONE
    expected_digest: str | None = None
    axes: list[AxisResult] = field(default_factory=list)
    wall_s: float = 0.0
    is_complete: bool = True

    @property
    def digest_matches(self) -> bool:
        """The digest is the one asked for, or none was."""
        return self.expected_digest is None or self.expected_digest.lower() == self.digest

    @property
    def noticed_by(self) -> list[str]:
        """Axes that saw a difference."""
        return [axis.name for axis in self.axes if axis.num_differing]

    @property
    def exit_code(self) -> CheckExit:
        """Of the program."""
        if self.control is not Control.NONE:
            return CheckExit.DIFFERENT if self.noticed_by else CheckExit.CONTROL_NOT_NOTICED
        ran = [axis for axis in self.axes if not axis.not_applicable]
        passed = self.digest_matches and all(axis.passed for axis in ran) and bool(ran or not self.axes)
        return CheckExit.EQUAL if passed else CheckExit.DIFFERENT

    def verdicts(self) -> dict[str, str]:
        """``equal``, ``different``, ``nothing proved`` or ``not run`` for each verdict."""
        found = {}
        for verdict in Verdict:
            axes = [axis for axis in self.axes if axis.verdict is verdict and not axis.not_applicable]
            if any(axis.num_differing for axis in axes):
                found[verdict.value] = "different"
            elif not axes:
                found[verdict.value] = "not run"
            else:
                found[verdict.value] = "equal" if all(axis.passed for axis in axes) else "nothing proved"
        return found

    @property
    def conclusion(self) -> str:
        """One sentence."""
        if not self.is_complete:
            return f"UNFINISHED: {len(self.axes)} axes have run"
        if self.control is not Control.NONE:
            if self.noticed_by:
                return f"control {self.control.value} was noticed by {', '.join(self.noticed_by)}, as it should be"
            return f"control {self.control.value} was NOT noticed: the axes run cannot show such a fault"
        if not self.digest_matches:
            return f"FAILED: the digest is not the expected {self.expected_digest}"
        if self.exit_code is CheckExit.EQUAL:
            return "passed: all outputs are equal, bit for bit"
        failed = [axis.name for axis in self.axes if not axis.passed and not axis.not_applicable]
        if not failed:
            return "FAILED: no axis could run, so nothing is proved"
        return f"FAILED: {', '.join(failed)}"

    def print_to(self, console: Console) -> None:
        """Print facts, table, verdicts and conclusion."""
        console.print(", ".join(f"{name} {value}" for name, value in self.facts.items()), highlight=False)
        table = Table()
        table.add_column("axis")
        table.add_column("verdict")
        for heading in ("cases", "unique outputs", "preemptions", "seconds"):
            table.add_column(heading, justify="right")
        table.add_column("finding", overflow="fold")
        for axis in self.axes:
            table.add_row(
                axis.name,
                axis.verdict.value,
                str(axis.num_cases),
                _unique(axis),
                str(axis.num_preemptions),
                f"{axis.wall_s:.1f}",
                axis.finding,
                style=None if axis.passed else "dim" if axis.not_applicable else "bold red",
            )
        console.print(table)
        console.print(
            "  ".join(f"{name}: {found}" for name, found in self.verdicts().items()), highlight=False
        )
        console.print(f"digest: {self.digest}", highlight=False, soft_wrap=True)
        console.print(f"{self.conclusion} ({self.wall_s:.1f} s)", highlight=False, soft_wrap=True)

    def to_json(self) -> str:
        """The whole report."""
        axes: list[dict[str, Any]] = [asdict(axis) | {"passed": axis.passed} for axis in self.axes]
        content = {
            "facts": self.facts,
            "control": self.control.value,
            "digest": self.digest,
            "expected_digest": self.expected_digest,
            "axes": axes,
            "verdicts": self.verdicts(),
            "conclusion": self.conclusion,
            "exit_code": int(self.exit_code) if self.is_complete else None,
            "is_complete": self.is_complete,
            "wall_s": self.wall_s,
        }
        return json.dumps(content, indent=2) + "\n"


def _unique(axis: AxisResult) -> str:
    wanted = axis.num_requests
    return str(wanted) if axis.num_unique_outputs == wanted else f"{axis.num_unique_outputs}, not {wanted}"
