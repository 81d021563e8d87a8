"""From a checkpoint to a decoder on one rank, with the start-up self-check."""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_runtime.comm.base import Dispatcher
from moe_runtime.comm.collective import CollectiveDispatcher
from moe_runtime.comm.groups import RankGroup
from moe_runtime.comm.loopback import LoopbackDispatcher
from moe_runtime.comm.multiple_reduction import MultipleReduction, resolve_multiple_reduction
from moe_runtime.comm.tensor_parallel import TensorParallel, check_tp
from moe_runtime.comm.transports import TransportName
from moe_runtime.engine.config import EngineConfig
from moe_runtime.engine.expert_weights import initial_placement, layer_replicas, local_specs, make_moe
from moe_runtime.eplb.placement import ModelPlacement
from moe_runtime.errors import InvarianceError
from moe_runtime.kernels.audit import AuditReport, audit_shapes
from moe_runtime.kernels.golden_digests import cpu_key
from moe_runtime.kernels.replicas import Replicas
from moe_runtime.layers.decoder import Decoder
from moe_runtime.layers.row_parallel import Level, row_parallel_shape, shard_width
from moe_runtime.models.checkpoint import Checkpoint
from moe_runtime.models.dummy_checkpoint import DummyCheckpoint
from moe_runtime.models.head_shard import head_shard
from moe_runtime.models.model_config import Dtype, ModelConfig, TensorSpec
from moe_runtime.models.registry import load_model_config, tensor_specs
from moe_runtime.models.resolve import resolve_model
from moe_runtime.models.tensor_source import TensorSource

if TYPE_CHECKING:
    from moe_runtime.layers.cuda_decoder import CudaDecoder

__all__ = [
    "NUMERICS_VERSION",
    "LoadedModel",
    "ModelPlan",
    "audit_cpu",
    "device_architecture",
    "load_model",
    "load_on_gpu",
    "plan_model",
]

NUMERICS_VERSION = 2
"""Raised whenever a tree or a rounding changes, so that results of two versions can differ."""

_DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """What is known of a model before its weights are read.

    Attributes:
        model_dir: Folder with configuration and tokenizer.
        config: The model.
        dtype: Model dtype in force.
        max_model_len: Context length in force, in tokens.
        device: Where it will run.
        placement: Where the experts of every layer are, by EP rank; virtual ranks where the dispatcher is loopback.
        multiple_reduction: Whether ranks pre-sum the slots that they hold, and why.
        fingerprint: Digest of checkpoint, dtype, numerics version, device architecture and, where ranks pre-sum, of
            the experts of each rank, at level ``batch`` of tp above 1, too: equal fingerprints mean equal bits.
    """

    model_dir: Path
    config: ModelConfig
    dtype: Dtype
    max_model_len: int
    device: torch.device
    placement: ModelPlacement
    multiple_reduction: MultipleReduction
    fingerprint: str

    @property
    def fixed_reason(self) -> str:
        """Why experts stay where they are; empty where they may be moved."""
        if not self.config.moe_layer_ids:
            return "the model has no experts"
        if self.placement.ep_size == 1:
            return "one EP rank holds all experts"
        if self.multiple_reduction.enabled:
            return "multiple_reduction is on, and bits depend on which experts share a rank; set rearrange_interval"
        return ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch names it."""
        return _DTYPES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model on one rank.

    Attributes:
        plan: What was known before.
        decoder: Runs it.
        audit: What the start-up self-check found.
        tensor_parallel: The ranks that run it together.
    """

    plan: ModelPlan
    decoder: Decoder | CudaDecoder
    audit: AuditReport
    tensor_parallel: TensorParallel = field(default_factory=TensorParallel)


def plan_model(
    engine_config: EngineConfig, group: RankGroup | None = None, *, placement: ModelPlacement | None = None
) -> ModelPlan:
    """Read a model's configuration and file headers, and settle all that is known without weights. Reads no weights.

    Args:
        engine_config: Settings.
        group: The ranks; one by default.
        placement: Where the experts of every layer are, on as many ranks as there will be, virtual ones included; by
            default consecutive ids.

    Raises:
        CheckpointError: the checkpoint's configuration is missing or uses something not implemented, or a tensor is
            missing, unexpected, mis-shaped, unindexed or truncated.
        ValueError: the settings do not fit the model.
    """
    model_dir = resolve_model(engine_config.model)
    config = load_model_config(model_dir)
    max_model_len = engine_config.max_model_len or config.max_position_embeddings
    if max_model_len > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len ({max_model_len}) must be at most the model's max_position_embeddings "
            f"({config.max_position_embeddings})"
        )
    dtype = config.dtype if engine_config.dtype == "auto" else engine_config.dtype
    tp = engine_config.tp
    device = _device(engine_config, group)
    check_tp(tp, 1 if group is None else group.size)
    head_shard(config, tp, 0)
    if config.vocab_size < tp:
        raise ValueError(f"vocab_size ({config.vocab_size}) must be at least tp ({tp})")
    if device.type == "cuda":
        _check_gpu_model(config)
    ep_size = 1 if group is None else group.size
    if engine_config.dispatcher == "loopback":
        ep_size = engine_config.loopback_ranks
    if device.type == "cuda" and engine_config.dispatcher == "deepep" and dtype != "bfloat16":
        raise ValueError(f"dtype ({dtype}) must be bfloat16 with dispatcher deepep")
    if device.type == "cuda":
        _check_gpu_rows(config, engine_config.max_num_batched_tokens, ep_size)
    placement = placement or initial_placement(
        config, ep_size, engine_config.num_redundant_experts, engine_config.initial_placement
    )
    if placement.ep_size != ep_size:
        raise ValueError(f"placement is for {placement.ep_size} ranks; must be for ep_size ({ep_size})")
    multiple_reduction = resolve_multiple_reduction(
        engine_config.invariance,
        placement.num_redundant_experts,
        engine_config.rearrange_interval,
        ep_size=ep_size,
        transport_can=True,
    )
    if engine_config.rearrange_interval and (ep_size == 1 or not config.moe_layer_ids):
        raise ValueError(
            f"rearrange_interval ({engine_config.rearrange_interval}) must be 0 where "
            + ("one EP rank holds all experts" if config.moe_layer_ids else "the model has no experts")
        )
    with _open(model_dir, dtype, engine_config, tensor_specs(config), device) as source:
        identity = f"{source.fingerprint()} {dtype} {NUMERICS_VERSION} {device_architecture(device)}"
    if multiple_reduction.enabled:
        identity += f" {_experts_by_rank(placement)}"
    if tp > 1 and engine_config.invariance == "batch":
        identity += f" batch tp={tp}"
    return ModelPlan(
        model_dir=model_dir,
        config=config,
        dtype=dtype,
        max_model_len=max_model_len,
        device=device,
        placement=placement,
        multiple_reduction=multiple_reduction,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest()[:16],
    )


def load_model(
    plan: ModelPlan,
    engine_config: EngineConfig,
    group: RankGroup,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    transport: TransportName = "collective",
    tensor_parallel: TensorParallel | None = None,
) -> LoadedModel:
    """Read this rank's weights, pack them, and prove on this machine that their shapes are position invariant.

    On the CPU it sets torch to one thread, for the whole process.

    Args:
        plan: From ``plan_model``.
        engine_config: Load format and seed.
        group: The expert-parallel group, that of the plan; ranks need not be in step here.
        on_progress: Told (tensor elements done, in total).
        transport: What moves rows between GPUs.
        tensor_parallel: From ``open_tensor_parallel`` for the settings' ``tp``.

    Raises:
        CheckpointError: a tensor is missing, unexpected, mis-shaped, unindexed or truncated.
        InvarianceError: the self-check failed.
        ValueError: the device cannot run the model.
    """
    if plan.device.type == "cuda":
        return load_on_gpu(
            plan, engine_config, group, on_progress, transport=transport, tensor_parallel=tensor_parallel
        )
    torch.set_num_threads(1)  # part of the CPU's schedule, in a caller's own program too
    config, dtype = plan.config, plan.torch_dtype
    tp = tensor_parallel or TensorParallel()
    assert tp.size == engine_config.tp, f"a group of {tp.size} ranks, tp ({engine_config.tp})"
    placement, presums = plan.placement, plan.multiple_reduction.enabled
    dispatcher: Dispatcher
    if engine_config.dispatcher == "loopback":
        dispatcher = LoopbackDispatcher(placement.first_expert, config.num_experts_per_tok, presums=presums)
        # This process holds the experts of all virtual ranks.
        placement = replace(placement, first_expert=(0, placement.first_expert[-1]))
    else:
        dispatcher = CollectiveDispatcher(
            group, placement.first_expert, config.num_experts_per_tok, presums=presums
        )
    specs = tensor_specs(config)
    wanted = local_specs(config, placement, group.rank)
    with _open(plan.model_dir, plan.dtype, engine_config, specs, plan.device) as source:
        weights = _WeightReader(source, wanted, on_progress)

        def read(role: str, layer_idx: int | None, expert_id: int | None = None) -> torch.Tensor:
            # Weights count in the model dtype; packing to fp32 is exact from there.
            return weights.read(role, layer_idx, expert_id).to(dtype)

        decoder = Decoder(
            config,
            read,
            lambda layer_idx: make_moe(
                config,
                placement,
                config.moe_layer_ids.index(layer_idx),
                group.rank,
                dispatcher,
                lambda role, expert: read(role, layer_idx, expert),
            ),
            dtype,
            plan.max_model_len,
            tp,
            engine_config.invariance,
        )
        source.close(expected=wanted)
    audit = audit_cpu(config, tp.size, engine_config.invariance)
    if audit.failures:
        raise InvarianceError(
            "the start-up self-check failed on this machine, so requests could change each other's bits: "
            + "; ".join(audit.failures)
        )
    return LoadedModel(plan=plan, decoder=decoder, audit=audit, tensor_parallel=tp)


def audit_cpu(config: ModelConfig, tp: int = 1, level: Level = "topology") -> AuditReport:
    """The start-up self-check on this CPU of the shapes that a rank runs."""
    return audit_shapes(
        _gemm_shapes(config, tp, level), config.head_dim, config.hidden_size, config.vocab_size
    )


def load_on_gpu(
    plan: ModelPlan,
    engine_config: EngineConfig,
    group: RankGroup,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    transport: TransportName = "collective",
    tensor_parallel: TensorParallel | None = None,
) -> LoadedModel:
    """``load_model`` of one rank on its GPU; on the CPU where Triton's interpreter is on.

    Args:
        plan: From ``plan_model``.
        engine_config: Load format and seed.
        group: The expert-parallel group.
        on_progress: Told (tensor elements done, in total).
        transport: What moves rows between GPUs.
        tensor_parallel: From ``open_tensor_parallel`` for the settings' ``tp``.
    """
    # All need Triton, which CPU machines may lack.
    from moe_runtime.engine.gpu_experts import make_gpu_experts
    from moe_runtime.engine.start_audit import check_schedules, load_schedules
    from moe_runtime.layers.cuda_decoder import CudaDecoder

    schedules = load_schedules(plan.device, plan.torch_dtype, engine_config.audit_cache)
    tp = tensor_parallel or TensorParallel()
    assert tp.size == engine_config.tp, f"a group of {tp.size} ranks, tp ({engine_config.tp})"
    placement, specs = plan.placement, tensor_specs(plan.config)
    local_experts: Sequence[Sequence[int]] | None = None
    replicas: Sequence[Replicas] | None = None
    wanted: Sequence[TensorSpec] = specs
    if placement.ep_size > 1:  # one rank needs no maps: its experts stand by their logical ids
        layers = range(placement.num_layers)
        if transport == "loopback":  # which holds the experts of all virtual ranks
            local_experts = placement.physical_to_logical_map.tolist()
        else:
            local_experts = [placement.layer(i).local_logical_experts(group.rank) for i in layers]
            wanted = local_specs(plan.config, placement, group.rank)
        if not (placement.is_identity and plan.fixed_reason):
            replicas = [layer_replicas(placement, i, plan.device) for i in layers]
    with _open(plan.model_dir, plan.dtype, engine_config, specs, plan.device) as source:
        weights = _WeightReader(source, wanted, on_progress)

        def read(role: str, layer_idx: int, expert_id: int | None) -> torch.Tensor:
            return weights.read(role, None if layer_idx < 0 else layer_idx, expert_id)

        decoder = CudaDecoder(
            plan.config,
            read,
            plan.torch_dtype,
            plan.max_model_len,
            engine_config.max_num_batched_tokens,
            plan.device,
            schedules,
            local_experts,
            replicas,
            make_gpu_experts(plan, group, transport, schedules),
            tp.on_device,
            engine_config.invariance,
            group,
        )
        source.close(expected=wanted)
    audit = AuditReport()
    if plan.device.type == "cuda":  # tests cover the interpreter, in which this would take minutes
        audit = check_schedules(decoder)
    return LoadedModel(plan=plan, decoder=decoder, audit=audit, tensor_parallel=tp)


class _WeightReader:
    """Reads a rank's tensors by their place in the model, and tells how many elements are there."""

    def __init__(
        self,
        source: TensorSource,
        wanted: Sequence[TensorSpec],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source = source
        self._by_place = {(spec.role, spec.layer_idx, spec.logical_expert_id): spec for spec in wanted}
        self._on_progress = on_progress
        self._total_elements = sum(math.prod(spec.shape) for spec in wanted)
        self._done_elements = 0

    def read(self, role: str, layer_idx: int | None, expert_id: int | None) -> torch.Tensor:
        spec = self._by_place[role, layer_idx, expert_id]
        tensor = self._source.read(spec)
        self._done_elements += math.prod(spec.shape)
        if self._on_progress is not None:
            self._on_progress(self._done_elements, self._total_elements)
        return tensor


def _open(
    model_dir: Path,
    dtype: Dtype,
    engine_config: EngineConfig,
    specs: Sequence[TensorSpec],
    device: torch.device,
) -> TensorSource:
    if engine_config.load_format == "dummy":
        return DummyCheckpoint(specs, dtype, engine_config.seed or 0, device)
    return Checkpoint(model_dir, specs)


def _device(engine_config: EngineConfig, group: RankGroup | None) -> torch.device:
    num_ranks = 1 if group is None else group.size
    if engine_config.device == "cpu" or (engine_config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device (cuda) must be cpu here: torch sees no GPU")
    if num_ranks == 1:
        return torch.device("cuda")
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        # A rank's own where a launcher shows each rank one GPU; whether ranks share it is seen once they can talk.
        return torch.device("cuda", 0)
    assert group is not None, "several ranks are a group"
    local_rank = group.rank if group.local_rank is None else group.local_rank
    # Not the rank: a host's ranks see one fault.
    num_local = group.size if group.local_size is None else group.local_size
    if num_local > num_gpus:
        # The CPU has other bits, so nothing falls back to it silently.
        raise ValueError(
            f"device ({engine_config.device}) must be cpu with more ranks on a host than GPUs: here are {num_local} "
            f"ranks, and torch sees {num_gpus}"
        )
    return torch.device("cuda", local_rank)


def _check_gpu_model(config: ModelConfig) -> None:
    """Refuse before any weights are read what the GPU path cannot run."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("device (cuda) needs Triton: install the package's gpu extra, or set device to cpu")
    from moe_runtime.layers.cuda_decoder import check_supported  # needs Triton

    check_supported(config)


def _check_gpu_rows(config: ModelConfig, max_rows: int, ep_size: int) -> None:
    """Refuse steps whose rows kernels could not address with 32 bits."""
    widest = max(ep_size * config.hidden_size, config.num_experts_per_tok * config.moe_intermediate_size)
    most = (2**31 - 1) // widest
    if max_rows > most:
        raise ValueError(
            f"max_num_batched_tokens ({max_rows}) must be at most {most} on GPUs for this model on {ep_size} ranks"
        )


def device_architecture(device: torch.device) -> str:
    """What equal bits need of the hardware."""
    if device.type == "cpu":
        return f"cpu {cpu_key()}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda-sm{major}{minor}"


def _experts_by_rank(placement: ModelPlacement) -> str:
    """What sums of pre-summed rows depend on; the order of a rank's experts does not count, since slots ascend."""
    layers = [
        [sorted(layer.local_logical_experts(rank)) for rank in range(placement.ep_size)]
        for layer in map(placement.layer, range(placement.num_layers))
    ]
    return str(layers[0] if all(layer == layers[0] for layer in layers) else layers)


def _gemm_shapes(config: ModelConfig, tp: int, level: Level) -> list[tuple[int, int, str]]:
    """(K, N, role) of every GEMM that a rank runs."""
    heads = head_shard(config, tp, 0)
    hidden, head_dim = config.hidden_size, config.head_dim
    shapes = [
        (hidden, (heads.num_query_heads + 2 * heads.num_kv_heads) * head_dim, "column"),
        row_parallel_shape(config.num_attention_heads * head_dim, hidden, tp, level),
        (hidden, -(-config.vocab_size // tp), "lm_head"),
    ]
    if config.moe_layer_ids:
        shapes += [
            (hidden, config.num_experts, "router"),
            (hidden, 2 * config.moe_intermediate_size, "expert"),
            (config.moe_intermediate_size, hidden, "expert"),
        ]
    if len(config.moe_layer_ids) < config.num_layers:
        shapes += [
            (hidden, 2 * shard_width(config.intermediate_size, tp), "column"),
            row_parallel_shape(config.intermediate_size, hidden, tp, level),
        ]
    return shapes
