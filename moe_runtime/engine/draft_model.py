"""Drafts from a small model, which each sampling rank runs by itself: no step of it has another rank in it.

It samples with the sequence's own noise, rules and parameters, so that equal distributions make equal choices: a draft
is right as often as the two models agree on the token, greedy or not. Its keys and values are in a cache of its own,
with as many blocks as the large model's. What it has computed is compared with the sequence's tokens each time, so
rejected drafts, preemption and prefixes that the large model found in its cache need no message.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import replace

from moe_runtime.comm.groups import RankGroup
from moe_runtime.engine.block_manager import BlockManager
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.model_loader import LoadedModel, ModelPlan, load_model, load_on_gpu, plan_model
from moe_runtime.engine.runner import Runner
from moe_runtime.engine.scheduler import ScheduledChunk
from moe_runtime.engine.sequence import Sequence
from moe_runtime.engine.speculative import Proposer
from moe_runtime.engine.step_form import num_mixed_tokens
from moe_runtime.layers.decoder import Decoder

__all__ = ["DraftModelProposer", "load_draft", "plan_draft"]


def plan_draft(plan: ModelPlan, config: EngineConfig) -> ModelPlan | None:
    """The small model of a deployment; None where there is none. Reads no weights.

    Args:
        plan: The large model.
        config: Settings of the deployment. Those of the weights hold for both: load format, dtype, device, seed.

    Raises:
        CheckpointError: as ``plan_model``.
        ValueError: its vocabulary is another one.
    """
    if config.draft_model is None:
        return None
    draft = plan_model(_draft_config(config))
    if draft.config.vocab_size != plan.config.vocab_size:
        raise ValueError(
            f"draft_model ({config.draft_model}) has a vocabulary of {draft.config.vocab_size} ids; must have the "
            f"model's {plan.config.vocab_size}"
        )
    return replace(draft, max_model_len=min(draft.max_model_len, plan.max_model_len), device=plan.device)


def load_draft(draft: ModelPlan | None, config: EngineConfig, model: LoadedModel) -> LoadedModel | None:
    """Read all of the small model's weights, where this rank samples; no collective.

    Args:
        draft: From ``plan_draft``.
        config: Settings of the deployment.
        model: The large model on this rank.

    Raises:
        As ``load_model``.
    """
    if draft is None or not model.tensor_parallel.is_first:
        return None
    load = load_model if isinstance(model.decoder, Decoder) else load_on_gpu
    return load(draft, _draft_config(config), RankGroup())


def _draft_config(config: EngineConfig) -> EngineConfig:
    assert config.draft_model is not None, "there is a draft model"
    return replace(
        config,
        model=config.draft_model,
        speculative="off",
        num_speculative_tokens=None,
        draft_model=None,
        max_model_len=None,
        dispatcher="collective",
        tp=1,
        invariance="topology",
        num_redundant_experts=0,
        initial_placement=None,
        rearrange_interval=0,
    )


class DraftModelProposer(Proposer):
    """Runs the small model as far as each sequence's drafts.

    Args:
        runner: Of the small model, over ``num_blocks`` blocks.
        num_blocks: Blocks of its cache.
        max_model_len: Its context, in tokens; past it there are no drafts.
        max_num_batched_tokens: Most tokens of a step of it. Of a long prompt one such step runs at a time, and there
            are no drafts until it has run.
    """

    def __init__(
        self, runner: Runner, num_blocks: int, max_model_len: int, max_num_batched_tokens: int
    ) -> None:
        self.runner = runner
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.blocks = BlockManager(num_blocks)
        # By sequence: its mirror, and how many of its tokens the mirror was last seen to have.
        self._mirrors: dict[Sequence, tuple[Sequence, int]] = {}

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """See ``Proposer.propose``."""
        self._forget_ended()
        ends: dict[int, int] = {}
        mirrors: list[Sequence] = []
        for sequence, num in wanted:
            mirror = self._mirror(sequence)
            mirrors.append(mirror)
            # The last draft is chosen and not run.
            end = min(sequence.num_tokens + num, self.max_model_len + 1)
            if end > sequence.num_tokens and self._has_room(mirror, end - 1, wanted):
                ends[id(mirror)] = end
        active = [mirror for mirror in mirrors if id(mirror) in ends]
        while active:
            self._step(active)
            active = [m for m in active if m.num_uncomputed_tokens == 1 and m.num_tokens < ends[id(m)]]
        return [
            tuple(mirror.token_ids[sequence.num_tokens :])
            for (sequence, _), mirror in zip(wanted, mirrors, strict=True)
        ]

    def _step(self, mirrors: list[Sequence]) -> None:
        """Run uncomputed tokens, as many as fit in a step; those that reach their end choose the next one."""
        room = self.max_num_batched_tokens
        chunks: list[ScheduledChunk] = []
        for mirror in sorted(mirrors, key=lambda m: m.num_uncomputed_tokens):
            num_tokens = min(mirror.num_uncomputed_tokens, room)
            if num_tokens:
                chunks.append(ScheduledChunk(mirror, num_tokens))
                room -= num_tokens
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        is_decode = not num_mixed_tokens(chunks, self.runner.most_prompt_rows)
        step = self.runner.launch(chunks, [num_tokens], is_decode=is_decode)
        results = step.collect()
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
        for row, result in zip(step.rows, results, strict=True):
            row.sequence.token_ids.append(result.token_id)

    def _mirror(self, sequence: Sequence) -> Sequence:
        """The small model's view of a sequence: its tokens, and how many of them have keys in the small cache."""
        mirror, num_known = self._mirrors.get(sequence, (None, 0))
        if mirror is None:
            mirror = copy(sequence)
            mirror.params = replace(
                sequence.params, logprobs=None, prompt_logprobs=None, return_routed_experts=False
            )
            mirror.grammar = None  # drafts that the grammar does not let follow are cut before they are used
            mirror.block_ids, mirror.num_computed_tokens = [], 0
            mirror.token_ids = list(sequence.token_ids)
        self._mirrors[sequence] = mirror, sequence.num_tokens
        num_equal = min(mirror.num_computed_tokens, sequence.num_tokens - 1)
        new = range(min(num_known, num_equal), num_equal)
        first = next((i for i in new if mirror.token_ids[i] != sequence.token_ids[i]), num_equal)
        mirror.num_computed_tokens = first
        mirror.token_ids[first:] = sequence.token_ids[first:]
        return mirror

    def _forget_ended(self) -> None:
        """Free the blocks of sequences that have ended; one that was preempted keeps what is computed."""
        for sequence in [sequence for sequence in self._mirrors if sequence.is_finished]:
            self.blocks.free(self._mirrors.pop(sequence)[0])

    def _has_room(self, mirror: Sequence, num_tokens: int, wanted: SequenceOf[tuple[Sequence, int]]) -> bool:
        """Room for a sequence's first tokens, at worst that of sequences that want no drafts now."""
        if self.blocks.grow(mirror, num_tokens):
            return True
        now = {sequence for sequence, _ in wanted}
        for sequence in [sequence for sequence in self._mirrors if sequence not in now]:
            self.blocks.free(self._mirrors.pop(sequence)[0])
        return self.blocks.grow(mirror, num_tokens)
