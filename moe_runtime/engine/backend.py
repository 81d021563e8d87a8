"""From settings to a running engine: which runner, how many KV blocks, which limits. Used online and offline alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from moe_runtime.comm.agreement import all_or_none
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.transports import EXCHANGE_TIMEOUT_S, TransportName
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.cpu_runner import CpuRunner
from moe_runtime.engine.draft_model import DraftModelProposer, plan_draft
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.expert_mover import ExpertMover
from moe_runtime.engine.follower import Follower
from moe_runtime.engine.grammar_threads import GrammarThreads
from moe_runtime.engine.kv_cache import KVCache, default_num_blocks, gpu_num_blocks, kv_block_bytes
from moe_runtime.engine.model_loader import LoadedModel, ModelPlan
from moe_runtime.engine.ngram_proposer import NgramProposer
from moe_runtime.engine.overlap import resolve_overlap
from moe_runtime.engine.request import RequestLimits
from moe_runtime.engine.runner import Runner
from moe_runtime.engine.scheduler import SchedulerConfig
from moe_runtime.engine.speculative import Speculation
from moe_runtime.errors import CapacityError
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.layers.decoder import Decoder

__all__ = ["Deployment", "exchange_buffer_bytes", "needs_control_group", "plan_deployment", "start_engine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What is settled before weights are read.

    Attributes:
        num_kv_blocks: Blocks of one rank's cache.
        limits: What a request may ask for.
        draft: The small model that drafts, where there is one; its cache has as many blocks.
    """

    num_kv_blocks: int
    limits: RequestLimits
    draft: ModelPlan | None = None


def plan_deployment(
    plan: ModelPlan,
    config: EngineConfig,
    group: RankGroup | None = None,
    transport: TransportName = "collective",
) -> Deployment:
    """Settle the KV cache and, from it, the limits of requests; a collective where ranks measure their GPUs.

    Args:
        plan: The model.
        config: Settings.
        group: The ranks; one by default.
        transport: What moves rows between them.

    Raises:
        CapacityError: a GPU has no room for one sequence of full length; on all ranks alike.
        ValueError: the draft model does not fit the model.
    """
    draft = plan_draft(plan, config)
    num_blocks = config.kv_cache_blocks
    if num_blocks is None and plan.device.type == "cuda":
        ranks = group or RankGroup()
        num_blocks = all_or_none(ranks, lambda: gpu_num_blocks(plan, config, ranks.size, transport, draft))
        # Requests have one limit, whichever rank serves them.
        num_blocks = int(ranks.all_gather(torch.tensor([num_blocks])).min())
    if num_blocks is None:
        num_blocks = default_num_blocks(
            plan.config,
            plan.torch_dtype,
            config.max_num_seqs,
            plan.max_model_len,
            config.tp,
            0 if draft is None else kv_block_bytes(draft.config, draft.torch_dtype),
        )
    limits = RequestLimits(
        vocab_size=plan.config.vocab_size,
        max_model_len=plan.max_model_len,
        max_kv_tokens=num_blocks * BLOCK_SIZE,
        eos_token_ids=plan.config.eos_token_ids,
    )
    return Deployment(num_kv_blocks=num_blocks, limits=limits, draft=draft)


def start_engine(
    model: LoadedModel,
    deployment: Deployment,
    config: EngineConfig,
    group: RankGroup,
    *,
    on_capture: Callable[[int, int], None] | None = None,
    mover: ExpertMover | None = None,
    control: RankGroup | None = None,
    draft: LoadedModel | None = None,
    grammars: GrammarThreads | None = None,
) -> Engine | Follower:
    """An engine around loaded weights; a follower on all ranks of a tensor-parallel group but the first. A collective.

    Args:
        model: From ``load_model``.
        deployment: From ``plan_deployment``.
        config: Limits of a step.
        group: The ranks.
        on_capture: Told (CUDA graphs captured, in total); None captures them when first needed.
        mover: From ``open_mover``.
        control: From ``open_control_group``, where ``needs_control_group``.
        draft: From ``load_draft``.
        grammars: Of the checkpoint's tokenizer; None where it has none.

    Raises:
        CapacityError: memory ran out somewhere; on all ranks alike, and the decoder is as before.
    """
    runner = _runner(model, deployment, config, group, on_capture)
    speculation = None
    if config.speculative != "off":
        speculation = all_or_none(group, lambda: _speculation(draft, deployment, config, on_capture))
    if mover is not None:
        mover.attach(runner.expert_load)
    tensor_parallel = model.tensor_parallel
    if not tensor_parallel.is_first:
        return Follower(runner, group, tensor_parallel, mover)
    return Engine(
        runner,
        deployment.num_kv_blocks,
        SchedulerConfig(
            max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        ),
        group,
        model.plan.config.eos_token_ids,
        tensor_parallel,
        mover,
        control,
        prefix_cache=config.prefix_cache,
        speculation=speculation,
        grammars=grammars,
    )


def needs_control_group(config: EngineConfig, device_type: str) -> bool:
    """Whether ``start_engine`` is to be given one: steps run in a thread beside the exchange of step vectors."""
    return device_type == "cpu" and resolve_overlap(config, device_type).enabled


def exchange_buffer_bytes(model: LoadedModel, group: RankGroup) -> int:
    """Bytes of this rank's buffers that rows of other ranks travel through; those of CPU ranks grow with the largest
    exchange so far."""
    if isinstance(model.decoder, Decoder):
        return 0 if group.links is None else group.links.num_buffer_bytes
    decoder = model.decoder
    return decoder.experts.num_bytes + decoder.shard_sum.num_bytes + decoder.row_gather.num_bytes


def _speculation(
    draft: LoadedModel | None,
    deployment: Deployment,
    config: EngineConfig,
    on_capture: Callable[[int, int], None] | None,
) -> Speculation | None:
    """What drafts on this rank; None where it only follows. No collective."""
    if config.speculative == "ngram":
        return Speculation(NgramProposer(), config.most_drafts)
    if draft is None:
        return None
    proposer = DraftModelProposer(
        _runner(draft, deployment, replace(config, overlap="off"), RankGroup(), on_capture),
        deployment.num_kv_blocks,
        draft.plan.max_model_len,
        config.max_num_batched_tokens,
    )
    return Speculation(proposer, config.most_drafts)


def _runner(
    model: LoadedModel,
    deployment: Deployment,
    config: EngineConfig,
    group: RankGroup,
    on_capture: Callable[[int, int], None] | None,
) -> Runner:
    plan, decoder, num_blocks = model.plan, model.decoder, deployment.num_kv_blocks
    if isinstance(decoder, Decoder):
        cache = all_or_none(
            group,
            lambda: KVCache(plan.config, num_blocks, plan.torch_dtype, model.tensor_parallel.size),
            reason=f"memory ran out for {num_blocks} KV blocks: lower kv_cache_blocks",
            failures=(RuntimeError, MemoryError),
        )
        overlap = resolve_overlap(config, "cpu")
        return CpuRunner(decoder, cache, config.load_window_steps, group if overlap.enabled else None)
    from moe_runtime.engine.cuda_runner import CudaRunner  # needs Triton, which CPU machines may lack

    def make() -> CudaRunner:
        runner = CudaRunner(
            decoder,
            num_blocks,
            config.max_num_seqs,
            plan.max_model_len,
            use_graphs=not config.enforce_eager and decoder.experts.capturable,
            drafts=config.speculative != "off",
            check_peers=None if group.watch is None else group.watch.check_peers,
            timeout_s=EXCHANGE_TIMEOUT_S if group.size > 1 else None,
            load_window_steps=config.load_window_steps,
            overlaps=resolve_overlap(config, "cuda").enabled,
        )
        if on_capture is not None and plan.device.type == "cuda":
            runner.capture_graphs(on_capture)
            torch.cuda.synchronize()
        return runner

    max_rows = decoder.max_rows
    decoder.reserve_rows(config.max_num_batched_tokens)
    try:
        return all_or_none(
            group,
            make,
            reason=f"the GPU's memory ran out beside {num_blocks} KV blocks: lower gpu_memory_utilization, "
            "kv_cache_blocks, max_num_seqs or max_num_batched_tokens",
        )
    except CapacityError as error:
        message = str(error)
    decoder.reserve_rows(max_rows, exactly=True)
    raise CapacityError(message)
