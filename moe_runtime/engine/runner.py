"""What runs a step on a device, and what it hands back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from moe_runtime.engine.batch import LogitsRow
from moe_runtime.engine.expert_load import ExpertLoad
from moe_runtime.engine.routed_experts import RoutedExperts
from moe_runtime.engine.sampler import ScoredRow
from moe_runtime.engine.scheduler import ScheduledChunk
from moe_runtime.engine.step_plan import StepPlan

__all__ = ["LaunchedStep", "Runner"]


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step under way.

    Attributes:
        rows: Tokens whose logits were wanted.
        collect: Waits for the device and gives one result per row; called once.
        routing: The experts of the tokens that want them (``routed_token_idx``), in order; called after ``collect``.
            None where no token does.
    """

    rows: SequenceOf[LogitsRow]
    collect: Callable[[], list[ScoredRow]]
    routing: Callable[[], RoutedExperts] | None = None


class Runner(ABC):
    """Runs the steps of one rank, one after another.

    Attributes:
        overlaps: Whether ``launch`` returns before the device is done and can take a step that continues sequences
            whose last token the step before is still choosing (``UNKNOWN_TOKEN``).
        most_prompt_rows: Tokens of a step up to which prompts run in the decode form too (engine/step_form.py).
        most_mixed_rows: Tokens of a rank up to which a step in the mixed form is a graph.
        in_thread: Whether a thread of the runner's runs the steps, and so enters ``RankGroup.step``.
        expert_load: Pairs counted so far, of tokens whose home is this rank.
    """

    overlaps: bool = False
    most_prompt_rows: int = 0
    most_mixed_rows: int = 0
    in_thread: bool = False
    expert_load: ExpertLoad

    @abstractmethod
    def launch(
        self, chunks: SequenceOf[ScheduledChunk], tokens_per_rank: SequenceOf[int], *, is_decode: bool
    ) -> LaunchedStep:
        """Start a step; a collective of all ranks, with no chunks too.

        Args:
            chunks: From the scheduler; their sequences are as before the step.
            tokens_per_rank: Tokens whose home is each rank, in the step.
            is_decode: ``StepView.is_decode``; the same on every rank.
        """

    def settle(self) -> None:  # noqa: B027  # a device keeps the order by itself
        """Wait until no launched step still uses the weights, where nothing else keeps the order (a device does)."""

    @abstractmethod
    def uncount(self, token_idx: SequenceOf[int]) -> None:
        """Take rows of the step launched last out of ``expert_load``: drafts that were wrong, and rows of sequences
        that had ended. The step may be under way; nothing is waited for. No collective.

        Args:
            token_idx: Rows of the group's step; those at home on another rank are left to it.
        """

    @abstractmethod
    def follow(self, plan: StepPlan, tokens_per_rank: SequenceOf[int], *, is_decode: bool) -> None:
        """Run the step that the first rank of the tensor-parallel group launches; as collective as ``launch``.

        Args:
            plan: From that rank; empty where the group has no tokens.
            tokens_per_rank: Tokens whose home is each rank, in the step.
            is_decode: As for ``launch``.
        """
