"""Starts a serving rank: front end (on rank 0) before weights, then model, self-check and the rank's loop.

Exit codes are those of moe_runtime/exit_codes.py. Once the front end is there, a watch (launch/rank_watch.py) ends the
rank when another one, the front end or the launcher has gone or hangs.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec
import torch

from moe_runtime.comm.agreement import all_or_none
from moe_runtime.comm.control_group import open_control_group
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.peer_watch import allow_silence
from moe_runtime.comm.tensor_parallel import TensorParallel, open_tensor_parallel
from moe_runtime.comm.transports import Transport, open_transport
from moe_runtime.config import ServeConfig
from moe_runtime.engine.backend import (
    Deployment,
    exchange_buffer_bytes,
    needs_control_group,
    plan_deployment,
    start_engine,
)
from moe_runtime.engine.draft_model import load_draft, plan_draft
from moe_runtime.engine.engine import Engine
from moe_runtime.engine.follower import Follower
from moe_runtime.engine.grammar_threads import MASK_WAIT_S, GrammarThreads, open_grammars
from moe_runtime.engine.kv_cache import kv_block_bytes
from moe_runtime.engine.model_loader import (
    NUMERICS_VERSION,
    ModelPlan,
    device_architecture,
    load_model,
    plan_model,
)
from moe_runtime.engine.open_mover import open_mover
from moe_runtime.engine.overlap import resolve_overlap
from moe_runtime.engine.tokenizer import Tokenizer
from moe_runtime.eplb.placement_file import placement_to_json
from moe_runtime.errors import CapacityError, InvarianceError
from moe_runtime.exit_codes import (
    EXIT_FAULT,
    EXIT_NO_FIT,
    EXIT_SELF_CHECK,
    EXIT_USAGE,
    exit_code_of_signal,
)
from moe_runtime.kernels.attention import BLOCK_SIZE
from moe_runtime.launch.cli import last_error, parse_config, print_error, usage_error
from moe_runtime.launch.distributed import close_ranks, init_ranks
from moe_runtime.launch.error_file import ErrorFile
from moe_runtime.launch.front_end import ChildFailedError, FrontEndProcess
from moe_runtime.launch.logs import setup_logging
from moe_runtime.launch.progress import progress_bar
from moe_runtime.launch.rank_service import RankService
from moe_runtime.launch.rank_watch import RankWatch
from moe_runtime.launch.step_clock import StepClock
from moe_runtime.planner.memory import check_fit, draft_memory, rank_memory
from moe_runtime.server.config import ServerConfig

__all__ = ["main"]

logger = logging.getLogger(__name__)

SIGNAL_DEBOUNCE_S = 0.5


def main(args: Sequence[str] | None = None) -> int:
    """Serve until drained. Returns the exit code."""
    error_file = ErrorFile(os.environ.get("RANK", "0"))
    try:
        code = _main(args, error_file)
    except SystemExit as end:
        _leave_reason(error_file, int(end.code or 0))
        raise
    except KeyboardInterrupt:
        code = exit_code_of_signal(signal.SIGINT)
    _leave_reason(error_file, code)
    return code


def _leave_reason(error_file: ErrorFile, code: int) -> None:
    """For torchrun."""
    if code:
        reason = "aborted by a signal" if code > exit_code_of_signal(signal.SIGHUP) else last_error()
        error_file.write(f"exit code {code}: {reason or 'see the log'}", is_first=True)
    else:
        error_file.remove()


def _main(args: Sequence[str] | None, error_file: ErrorFile) -> int:
    start_s = time.monotonic()
    config = parse_config(ServeConfig, args, prog="moe_runtime.serve")
    try:
        group = init_ranks(config.engine.device)
    except ValueError as error:
        usage_error(str(error))
    setup_logging(group.rank, log_format=config.log_format)
    plan = _plan(config, group)
    tensor_parallel: TensorParallel | None = None
    try:
        transport = open_transport(group, config.engine.dispatcher, plan.device)
        group = transport.group
        tensor_parallel = open_tensor_parallel(group, config.engine.tp, config.engine.dispatcher, plan.device)
        deployment = plan_deployment(plan, config.engine, group, transport.name)
    except (ValueError, CapacityError) as error:  # on every rank alike
        does_not_fit = isinstance(error, CapacityError)
        if group.rank == 0:
            print_error(f"the model does not fit: {error}" if does_not_fit else str(error))
        close_ranks(group, tensor_parallel)
        return EXIT_NO_FIT if does_not_fit else EXIT_USAGE
    front_end: FrontEndProcess | None = None
    watch: RankWatch | None = None
    address = _Address()
    try:
        if group.rank == 0:
            try:
                front_end = FrontEndProcess(_server_config(config, plan, deployment, group))
                address = _Address(
                    endpoint=front_end.endpoint, watch=front_end.watch_endpoint, port=front_end.port
                )
            except ChildFailedError as error:
                if error.exit_code != EXIT_USAGE:  # else it has said what is wrong
                    logger.error("%s", error)
                address = _Address(exit_code=error.exit_code or EXIT_FAULT)
        address = msgspec.msgpack.decode(
            group.all_gather_bytes(msgspec.msgpack.encode(address))[0], type=_Address
        )
        if address.exit_code:
            close_ranks(group, tensor_parallel)
            return address.exit_code
        watch = RankWatch(
            group.rank,
            address.watch,
            heartbeat_timeout_s=config.http.heartbeat_timeout_s,
            clock=StepClock(config.steps.slow_step_s),
            error_file=error_file,
            front_end=front_end,
        )
        watch.start()
        try:
            return _serve(
                config, plan, deployment, transport, tensor_parallel, front_end, address, watch, start_s
            )
        except Exception as error:
            logger.exception("rank %d cannot go on", group.rank)
            watch.fail(error)
    finally:
        if watch is not None:
            watch.close()
        if front_end is not None:
            front_end.close()


class _Greeting(msgspec.Struct, frozen=True, kw_only=True):
    """What ranks tell each other before anything else: what they are to run, or why they cannot."""

    identity: str = ""
    fault: str = ""


class _Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where rank 0's front end listens; with an exit code, that it does not."""

    endpoint: str = ""
    watch: str = ""
    port: int = 0
    exit_code: int = 0


def _plan(config: ServeConfig, group: RankGroup) -> ModelPlan:
    """The plan, once all ranks have the same one; else they end together, with the code of usage.

    This is the ranks' first exchange, whatever their flags: other flags may lead to other collectives.
    """
    plan: ModelPlan | None = None
    try:
        plan = plan_model(config.engine, group)
        draft = plan_draft(plan, config.engine)
        drafting = "" if draft is None else f" drafts {draft.fingerprint}"
        greeting = _Greeting(identity=f"{plan.fingerprint}{drafting} {config.engine}")
    except ValueError as error:  # CheckpointError is one
        greeting = _Greeting(fault=str(error))
    greetings = [
        msgspec.msgpack.decode(data, type=_Greeting)
        for data in group.all_gather_bytes(msgspec.msgpack.encode(greeting))
    ]
    faults = [rank for rank, other in enumerate(greetings) if other.fault]
    if faults:
        if group.rank == faults[0]:
            print_error(greeting.fault)
    elif plan is not None and not _has_other_identity(greetings, group):
        return plan
    close_ranks(group)  # nobody leaves, which ends the others, before all have spoken
    raise SystemExit(EXIT_USAGE)


def _has_other_identity(greetings: Sequence[_Greeting], group: RankGroup) -> bool:
    """Whether some rank was started unlike rank 0; the lowest such rank says so."""
    identity = greetings[0].identity
    others = [rank for rank, greeting in enumerate(greetings) if greeting.identity != identity]
    if others and group.rank == others[0]:
        logger.error(
            "rank %d was started with other flags or another checkpoint than rank 0: %s against %s",
            group.rank,
            greetings[group.rank].identity,
            identity,
        )
    return bool(others)


def _serve(
    config: ServeConfig,
    plan: ModelPlan,
    deployment: Deployment,
    transport: Transport,
    tensor_parallel: TensorParallel,
    front_end: FrontEndProcess | None,
    address: _Address,
    watch: RankWatch,
    start_s: float,
) -> int:
    group = transport.group
    control: RankGroup | None = None
    if group.rank == 0:
        logger.info("dispatcher %s: %s", transport.name, transport.reason)
        if tensor_parallel.size > 1:
            logger.info("tensor parallelism %s: %s", tensor_parallel.transport, tensor_parallel.reason)
        if config.engine.speculative != "off":
            drafts = config.engine.most_drafts
            logger.info("speculation %s: at most %d drafts a step", config.engine.speculative, drafts)
    try:
        all_or_none(group, lambda: _check_memory(plan, deployment, group, config.engine.tp))
        with progress_bar("loading weights", shown=group.rank == 0) as on_progress:
            model = load_model(
                plan,
                config.engine,
                group,
                on_progress=on_progress,
                transport=transport.name,
                tensor_parallel=tensor_parallel,
            )
        draft = load_draft(deployment.draft, config.engine, model)
        mover = open_mover(model, config.engine, group)
        if needs_control_group(config.engine, plan.device.type):
            control = open_control_group(group)
        grammars = _grammars(plan) if tensor_parallel.is_first else None
        with progress_bar("capturing graphs", shown=group.rank == 0) as on_capture:
            engine = start_engine(
                model,
                deployment,
                config.engine,
                group,
                on_capture=on_capture,
                mover=mover,
                control=control,
                draft=draft,
                grammars=grammars,
            )
        if config.http.kv_events:
            engine.report_kv_events()
        # The front end's watch, which names the first fault, is to speak first.
        allow_silence(config.http.heartbeat_timeout_s + 1.0)
    except ValueError as error:  # CheckpointError is one
        usage_error(str(error))
    except InvarianceError as error:
        print_error(str(error))
        return EXIT_SELF_CHECK
    except (CapacityError, MemoryError, torch.OutOfMemoryError) as error:
        print_error(f"the model does not fit: {error}")
        return EXIT_NO_FIT
    logger.info("self-check passed: %d comparisons, equal bits", model.audit.num_comparisons)
    info: dict[str, str | int | float | bool | None] = {
        "num_kv_blocks": deployment.num_kv_blocks,
        "num_local_experts": plan.placement.slots_per_rank[group.rank],
        "num_redundant_experts": plan.placement.num_redundant_experts,
        "initial_expert_placement": plan.placement.sha256,
        "tp_rank": tensor_parallel.rank,
        "device": _device_name(plan.device),
        "dispatcher": transport.name,
        "dispatcher_reason": transport.reason,
        "tp_transport": tensor_parallel.transport,
        "tp_transport_reason": tensor_parallel.reason,
        "rearrangement_spare_bytes": 0 if mover is None else mover.spare_bytes,
        "exchange_buffer_bytes": exchange_buffer_bytes(model, group),
        "num_self_check_comparisons": model.audit.num_comparisons,
        "start_s": round(time.monotonic() - start_s, 2),
    }
    watch.clock.numbers = functools.partial(_numbers, engine)
    service = RankService(
        engine, group.rank, address.endpoint, info, clock=watch.clock, on_drain=watch.expect_end
    )
    _install_signal_handlers(front_end, watch)
    if group.rank == 0:
        logger.info("serving on http://%s:%d", config.http.host, address.port)
    watch.is_starting = False
    service.run()
    exit_code = service.exit_code
    service.close()
    if mover is not None:
        mover.close()
    watch.clock.numbers = str
    del engine, service
    gc.collect()  # captured graphs hold on to the communicators that end next
    close_ranks(group, tensor_parallel, control)
    return exit_code


def _grammars(plan: ModelPlan) -> GrammarThreads:
    """Of this rank, its vocabulary prepared: no step shall wait for that."""
    tokenizer = Tokenizer.from_dir(plan.model_dir)
    grammars = open_grammars(
        tokenizer, plan.config.vocab_size, plan.config.eos_token_ids, max_wait_s=MASK_WAIT_S
    )
    assert grammars is not None, "there is a tokenizer"
    assert grammars.compiler is not None, "made when first asked for"
    return grammars


def _numbers(engine: Engine | Follower) -> str:
    """Of the step under way, in words."""
    vector = engine.last_vector
    return (
        f"{vector.num_tokens} tokens, {vector.num_mixed_tokens} of them of prompts, "
        f"{vector.num_unfinished} sequences"
    )


def _check_memory(plan: ModelPlan, deployment: Deployment, group: RankGroup, tp: int) -> None:
    """Refuse before loading what this host cannot hold; its first rank speaks for all of them."""
    local_size = group.size if group.local_size is None else group.local_size
    local_rank = group.rank if group.local_rank is None else group.local_rank
    if local_rank != 0 or plan.device.type != "cpu":
        return
    first, num_blocks = group.rank, deployment.num_kv_blocks
    block_bytes = kv_block_bytes(plan.config, plan.torch_dtype, tp)
    ranks = [
        rank_memory(
            plan.config,
            plan.placement,
            rank,
            num_blocks,
            block_bytes,
            tp,
            moves_experts=not plan.fixed_reason,
        )
        for rank in range(first, first + local_size)
    ]
    own = ranks[group.rank - first]
    if deployment.draft is not None:
        ranks += [
            draft_memory(deployment.draft, num_blocks)
            for rank in range(first, first + local_size)
            if rank % tp == 0
        ]
    check_fit(ranks, _available_bytes())
    logger.info(
        "rank %d: %.1f MiB of weights, %.1f MiB of KV cache (%d blocks)",
        group.rank,
        own.weight_bytes / 2**20,
        own.kv_bytes / 2**20,
        num_blocks,
    )


def _available_bytes() -> int:
    """Memory that could be had without swapping, from /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _server_config(
    config: ServeConfig, plan: ModelPlan, deployment: Deployment, group: RankGroup
) -> ServerConfig:
    logger.info("%s", plan.multiple_reduction)
    overlap = resolve_overlap(config.engine, plan.device.type)
    logger.info("%s", overlap)
    model = plan.config
    return ServerConfig(
        host=config.http.host,
        port=config.http.port,
        served_model_name=config.http.served_model_name or config.engine.model.rstrip("/"),
        model_dir=str(plan.model_dir),
        limits=deployment.limits,
        world_size=group.size,
        tp=config.engine.tp,
        zmq_host=group.address,
        expert_placement=placement_to_json(plan.placement) if plan.config.moe_layer_ids else None,
        load_window_steps=config.engine.load_window_steps,
        experts_fixed_reason=plan.fixed_reason,
        api_key=config.http.api_key,
        seed=config.engine.seed,
        drain_timeout_s=config.http.drain_timeout_s,
        heartbeat_timeout_s=config.http.heartbeat_timeout_s,
        slow_step_s=config.steps.slow_step_s,
        step_timeout_s=config.steps.step_timeout_s,
        log_format=config.log_format,
        request_timeout_s=config.http.request_timeout_s,
        prefix_cache=config.engine.prefix_cache,
        kv_block_size=BLOCK_SIZE,
        kv_events=config.http.kv_events,
        max_num_seqs=config.engine.max_num_seqs,
        max_queued_seqs=config.http.max_queued_seqs,
        max_queued_tokens=config.http.max_queued_tokens,
        max_unread_bytes=config.http.max_unread_bytes,
        reader_timeout_s=config.http.reader_timeout_s,
        info={
            "system_fingerprint": f"fp_{plan.fingerprint}",
            "invariance": config.engine.invariance,
            "multiple_reduction": plan.multiple_reduction.enabled,
            "multiple_reduction_reason": plan.multiple_reduction.reason,
            "overlap": overlap.enabled,
            "overlap_reason": overlap.reason,
            "numerics_version": NUMERICS_VERSION,
            "device": plan.device.type,
            "ep_size": group.size,
            "tp": config.engine.tp,
            "architecture": plan.config.architecture,
            "dtype": plan.dtype,
            "device_architecture": device_architecture(plan.device),
            "config": msgspec.to_builtins(config.engine),
            "resolved": {
                "kv_cache_blocks": deployment.num_kv_blocks,
                "max_model_len": plan.max_model_len,
                "num_speculative_tokens": config.engine.most_drafts,
                "draft_model_dir": None if deployment.draft is None else str(deployment.draft.model_dir),
                "model_dir": str(plan.model_dir),
                "num_layers": model.num_layers,
                "moe_layer_ids": list(model.moe_layer_ids),
                "num_experts": model.num_experts,
                "num_experts_per_tok": model.num_experts_per_tok,
            },
            "http": {
                **msgspec.to_builtins(config.http),
                "api_key": None if config.http.api_key is None else "set",
            },
        },
    )


def _device_name(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _install_signal_handlers(front_end: FrontEndProcess | None, watch: RankWatch) -> None:
    """Rank 0 passes SIGTERM and SIGINT to the front end, which drains all ranks; the others wait for that.

    A launcher signals the ranks that are left when one has gone, too; then there is nothing to drain. One key press can
    reach a process twice, from the terminal and from torchrun; signals close together count once.
    """
    last_s = 0.0

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if front_end is not None and now_s - last_s > SIGNAL_DEBOUNCE_S and not watch.has_fault:
            front_end.forward(signal.Signals(signum))
        last_s = now_s

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)
