"""Offline generation.

Alone, one process runs the whole model. Under torchrun every rank makes the same ``LLM`` and the same calls; requests
are spread over the ranks and every rank gets all results. Neither changes a bit of any result at level ``topology``; at
level ``batch`` the number of ranks does.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, replace
from typing import Literal

import msgspec
import torch

from moe_runtime.comm.control_group import open_control_group
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.tensor_parallel import open_tensor_parallel
from moe_runtime.comm.transports import open_transport
from moe_runtime.engine.backend import Deployment, needs_control_group, plan_deployment, start_engine
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.disturbances import Disturbances, PlannedDisturbances
from moe_runtime.engine.draft_model import load_draft
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.expert_mover import ExpertMover
from moe_runtime.engine.follower import Follower
from moe_runtime.engine.generation_config import sampling_defaults
from moe_runtime.engine.grammar_threads import open_grammars, with_grammars
from moe_runtime.engine.model_loader import LoadedModel, load_model, plan_model
from moe_runtime.engine.open_mover import open_mover
from moe_runtime.engine.outputs import Collector, CompletionOutput, RequestOutput
from moe_runtime.engine.request import Request, SamplingParams, choice_seed, make_request
from moe_runtime.engine.scheduled_moves import ScheduledMoves
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.errors import CapacityError, CheckpointError

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]

logger = logging.getLogger(__name__)


class LLM:
    """A loaded model to call.

    Args:
        model: Folder of a checkpoint, a hub id, or ``builtin``.
        group: The ranks; by default this process alone.
        on_progress: Told (tensor elements loaded, in total) while loading.
        **options: Further fields of ``EngineConfig``.

    Raises:
        CheckpointError, ValueError, InvarianceError: As loading does.
        CapacityError: there is no room.
    """

    def __init__(
        self,
        model: str = "builtin",
        *,
        group: RankGroup | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        **options: str | int | None,
    ) -> None:
        self.config = msgspec.convert({"model": model, **options}, EngineConfig)
        self.group = group or RankGroup()
        self._engine: Engine | Follower | None = None
        self._control: RankGroup | None = None
        plan = plan_model(self.config, self.group)
        if self.group.rank == 0 and self.config.invariance == "batch":  # elsewhere nobody could expect it
            logger.info("%s", plan.multiple_reduction)
        self.transport = open_transport(self.group, self.config.dispatcher, plan.device)
        self.group = self.transport.group
        tensor_parallel = open_tensor_parallel(
            self.group, self.config.tp, self.config.dispatcher, plan.device
        )
        # On a GPU, from what is free before the weights.
        deployment = plan_deployment(plan, self.config, self.group, self.transport.name)
        self.model: LoadedModel = load_model(
            plan,
            self.config,
            self.group,
            on_progress=on_progress,
            transport=self.transport.name,
            tensor_parallel=tensor_parallel,
        )
        self._draft = load_draft(deployment.draft, self.config, self.model)
        try:
            self.tokenizer: Tokenizer | None = Tokenizer.from_dir(plan.model_dir)
        except CheckpointError:
            # Token ids in, token ids out needs no tokenizer; text prompts are refused where there is none.
            self.tokenizer = None
        self._grammars = open_grammars(self.tokenizer, plan.config.vocab_size, plan.config.eos_token_ids)
        self._mover: ExpertMover | None = None
        if self.config.rearrange_interval:
            self._mover = open_mover(self.model, self.config, self.group)
        self._start_engine(deployment)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        group: RankGroup | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> LLM:
        """The same from settings that are one object already."""
        options = {f.name: getattr(config, f.name) for f in fields(config)}
        return cls(group=group, on_progress=on_progress, **options)

    @property
    def num_engines(self) -> int:
        """Ranks that serve requests: the first of each group of ``tp``."""
        return self.group.size // self.config.tp

    @property
    def engine(self) -> Engine | Follower:
        """What runs the steps on this rank.

        Raises:
            RuntimeError: after ``stop_engine``.
        """
        if self._engine is None:
            raise RuntimeError("the engine is stopped; reconfigure starts one")
        return self._engine

    @property
    def placement(self) -> ModelPlacement:
        """Where the experts of every layer are now."""
        return self.model.plan.placement if self._mover is None else self._mover.placement

    def stop_engine(self) -> None:
        """Give up the KV cache and the graphs, as for another model that needs the room; the weights stay.

        ``reconfigure`` starts an engine again. What it had not finished is forgotten.
        """
        self._engine = None
        gc.collect()  # a runner and its graphs refer to each other
        torch.cuda.empty_cache()

    def close(self) -> None:
        """``stop_engine`` for good, and end this model's links between ranks, not torch.distributed; a collective."""
        self.stop_engine()
        if self._grammars is not None:
            self._grammars.close()
        if self._mover is not None:
            self._mover.close()
        # Nobody's links end while another rank still takes rows from them.
        replace(self.group, links=None).all_gather(torch.zeros(1))
        for group in (self.group, self._control, self.model.tensor_parallel.group):
            if group is not None:
                group.close()

    def _start_engine(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.limits = deployment.limits
        if self._control is None and needs_control_group(self.config, self.model.plan.device.type):
            self._control = open_control_group(self.group)
        self._engine = start_engine(
            self.model,
            deployment,
            self.config,
            self.group,
            mover=self._mover,
            control=self._control,
            draft=self._draft,
            grammars=self._grammars,
        )

    def reconfigure(
        self,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        kv_cache_blocks: int | None = None,
        enforce_eager: bool | None = None,
        overlap: Literal["auto", "on", "off"] | None = None,
    ) -> None:
        """Start a fresh engine with other limits around the same weights; None keeps a limit. All ranks alike.

        On a GPU the number of KV blocks stays too where none is named: what is free then says little, with the weights
        in place. After ``stop_engine`` the former limits count as kept.

        Raises:
            CapacityError: a rank has no room for these limits; on all ranks alike, where the former ones are in force
                again.
        """
        config = self.config
        if self.model.plan.device.type == "cuda":
            kv_cache_blocks = kv_cache_blocks or self.deployment.num_kv_blocks
        wanted = replace(
            config,
            max_num_seqs=max_num_seqs or config.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens or config.max_num_batched_tokens,
            kv_cache_blocks=kv_cache_blocks or config.kv_cache_blocks,
            enforce_eager=config.enforce_eager if enforce_eager is None else enforce_eager,
            overlap=overlap or config.overlap,
        )
        deployment = plan_deployment(self.model.plan, wanted, self.group, self.transport.name)
        before = self.deployment
        self.config = wanted
        self.stop_engine()  # its cache makes room for the next one's
        try:
            self._start_engine(deployment)
            return
        except CapacityError as error:
            message = str(error)  # the error itself holds on to the memory that was taken
        self.config = config
        self._start_engine(before)
        raise CapacityError(message)

    def flush_cache(self) -> None:
        """Forget what the prefix cache holds; no result depends on it. Under torchrun every rank calls it."""
        if isinstance(self.engine, Engine):
            self.engine.flush.now()

    def default_sampling_params(self) -> SamplingParams:
        """The checkpoint's own temperature, top_p, top_k, min_p and repetition_penalty (``generation_config.json``), as
        over HTTP.

        Change single fields with ``dataclasses.replace``; ``SamplingParams(...)`` itself knows no checkpoint, and what
        it leaves out is 1.0 or off.

        Raises:
            CheckpointError: the file is malformed, or asks for what is not implemented (beams, ...).
        """
        return SamplingParams(**sampling_defaults(self.model.plan.model_dir))

    def generate(
        self,
        prompts: SequenceOf[str | SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        ranks: SequenceOf[int] | None = None,
        arrival_steps: SequenceOf[int] | None = None,
        moves: Mapping[int, ModelPlacement | None] | None = None,
        disturbances: PlannedDisturbances | None = None,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[RequestOutput]:
        """Run requests to their end; under torchrun a collective of all ranks with equal arguments.

        Args:
            prompts: Texts or token ids.
            params: For all prompts, or one per prompt, taken exactly as given; by default
                ``default_sampling_params()``.
            ranks: Group of ``tp`` ranks that serves each prompt, by default a rank; by default they take turns.
            arrival_steps: Step at which each prompt arrives; by default all at the first.
            moves: By step of this call, a placement that experts are moved to from then on, or None for one that evens
                out the load so far; one layer a step, as soon as the move before is complete. No result depends on it.
            disturbances: Preemptions and aborts, for checks.
            on_finished: Told the number of this rank's prompts that have finished.

        Returns:
            One result per prompt, in order, on every rank.

        Raises:
            InvalidRequestError: a prompt or a parameter breaks a rule; nothing has run.
            CheckpointError: ``params`` is None and ``default_sampling_params`` refuses.
            ValueError: ``moves`` is for other experts or ranks, or experts stay here.
            MoveError: a move failed.
        """
        if moves:
            self._require_mover()
        scheduled = ScheduledMoves(self._mover, moves or {}, self.group.rank)
        if params is None:
            params = self.default_sampling_params()
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"params ({len(params)}) must be one, or as many as prompts ({len(prompts)})")
        bad_word_ids = None if self.tokenizer is None else functools.cache(self.tokenizer.bad_word_ids)
        requests = [
            make_request(
                str(i),
                self._token_ids(prompt),
                p,
                self.limits,
                fallback_seed=self._fallback_seed(i),
                bad_word_ids=bad_word_ids,
            )
            for i, (prompt, p) in enumerate(zip(prompts, params, strict=True))
        ]
        requests = with_grammars(requests, self._grammars)
        owner = list(ranks) if ranks is not None else list(range(len(prompts)))
        arrival = list(arrival_steps) if arrival_steps is not None else [0] * len(prompts)
        mine = sorted(
            (arrival[i], i)
            for i in range(len(prompts))
            if owner[i] % self.num_engines * self.config.tp == self.group.rank
        )
        try:
            disturbing = Disturbances(self.engine, disturbances)
            finished = self._run(
                [(step, requests[i]) for step, i in mine], on_finished, scheduled, disturbing
            )
        except BaseException:
            self.engine.abort_all()  # or what is left would answer requests of the next call
            self.flush_cache()  # a step that was planned may not have run
            raise
        gathered = self.group.all_gather_bytes(msgspec.msgpack.encode(finished))
        by_id: dict[str, RequestOutput] = {}
        for data in gathered:
            by_id |= msgspec.msgpack.decode(data, type=dict[str, RequestOutput])
        return [by_id[request.request_id] for request in requests]

    def chat(
        self,
        conversations: SequenceOf[SequenceOf[dict[str, str]]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """``generate`` on conversations rendered with the model's chat template."""
        prompts = [self.chat_prompt(c, continue_final_message=continue_final_message) for c in conversations]
        return self.generate(prompts, params)

    def chat_prompt(
        self, messages: SequenceOf[dict[str, str]], *, continue_final_message: bool = False
    ) -> list[int]:
        """Token ids of a conversation, rendered with the model's chat template up to the assistant's turn, or up to the
        end of its last message, which is the assistant's.
        """
        if self.tokenizer is None:
            raise ValueError(f"{self.model.plan.model_dir} has no tokenizer, so it has no chat template")
        text = self.tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=not continue_final_message,
            continue_final_message=continue_final_message,
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _require_mover(self) -> None:
        reason = self.model.plan.fixed_reason
        if reason:
            raise ValueError(f"moves must be left out: {reason}")
        if self._mover is None:
            self._mover = self.engine.mover = open_mover(self.model, self.config, self.group)
            assert self._mover is not None, "experts may be moved"
            self._mover.attach(self.engine.runner.expert_load)

    def _fallback_seed(self, index: int) -> int | None:
        return None if self.config.seed is None else choice_seed(self.config.seed, index + 1) >> 1

    def _token_ids(self, prompt: str | SequenceOf[int]) -> SequenceOf[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError(f"{self.model.plan.model_dir} has no tokenizer; give prompts as token ids")
        return self.tokenizer.encode(prompt, add_special_tokens=True)

    def _run(
        self,
        arrivals: list[tuple[int, Request]],
        on_finished: Callable[[int], None] | None,
        moves: ScheduledMoves,
        disturbances: Disturbances,
    ) -> dict[str, RequestOutput]:
        """Step with all ranks until nothing is left anywhere; returns this rank's results."""
        collectors = {request.request_id: Collector(request, self.tokenizer) for _, request in arrivals}
        pending = list(reversed(arrivals))
        step = 0
        while True:
            moves.ask(step)
            while pending and pending[-1][0] <= step:
                self.engine.add_request(pending.pop()[1])
            for request_id in disturbances.before_step():
                collectors[request_id].choices[0].finish_reason = "abort"
            view, outputs = self.engine.step(num_pending=len(pending) + moves.num_pending)
            self.engine.take_expert_load()  # for nobody here
            step += 1
            for output in outputs:
                collector = collectors[output.request_id]
                if collector.add(output):
                    self.engine.abort(output.request_id, output.choice_idx)
            if on_finished is not None:
                on_finished(sum(collector.is_finished for collector in collectors.values()))
            if view.may_sleep:
                moves.finish()
                disturbances.finish(list(collectors))
                return {request_id: collector.result() for request_id, collector in collectors.items()}
