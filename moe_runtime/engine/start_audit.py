"""The schedules of a GPU engine: the table for its device, and the short audit at every start."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import torch

from moe_runtime.env import cache_folder
from moe_runtime.kernels.audit import AuditReport
from moe_runtime.kernels.audit_report import device_key, load_findings
from moe_runtime.kernels.gemm import PARTS
from moe_runtime.kernels.gpu_audit import audit_short
from moe_runtime.kernels.gpu_audit_ops import ModelShapes
from moe_runtime.kernels.gpu_schedules import GpuSchedules, device_kind
from moe_runtime.layers.cuda_decoder import CudaDecoder
from moe_runtime.models.model_config import ModelConfig

__all__ = ["audit_folder", "check_schedules", "load_schedules", "model_shapes"]

logger = logging.getLogger(__name__)


def model_shapes(
    config: ModelConfig, dtype: torch.dtype, num_local_experts: int | None = None
) -> ModelShapes:
    """What the kernels see of a model, of which this device holds some or all experts."""
    return ModelShapes(
        hidden=config.hidden_size,
        num_query_heads=config.num_attention_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_experts=config.num_experts,
        num_topk=config.num_experts_per_tok,
        width=config.moe_intermediate_size,
        vocab_size=config.vocab_size,
        norm_topk_prob=config.norm_topk_prob,
        qk_norm=config.qk_norm,
        windows=tuple(dict.fromkeys(config.sliding_windows)),
        dtype=dtype,
        num_local_experts=num_local_experts,
    )


def audit_folder(setting: str | None) -> Path:
    """Where results of audits are kept."""
    return cache_folder() if setting is None else Path(setting)


def load_schedules(device: torch.device, dtype: torch.dtype, audit_cache: str | None) -> GpuSchedules:
    """The table for a device, with what earlier audits of this very device and libraries found."""
    findings = load_findings(audit_folder(audit_cache), device_key(device))
    return GpuSchedules(device_kind(device), dtype, findings)


def check_schedules(decoder: CudaDecoder) -> AuditReport:
    """Compare the schedules that the decoder will use with the canonical ones, on its first layer's weights.

    Returns:
        How many comparisons were equal.

    Raises:
        InvarianceError: naming the op and schedule that does not keep the promise.
    """
    start_s = time.perf_counter()
    layer = decoder.layers[0]
    weights = {
        "qkv": layer.qkv,
        "o_proj": layer.o_proj,
        "lm_head": decoder.lm_head,
        "router": layer.router,
        "w13": layer.experts.w13,
        "w2": layer.experts.w2,
    }
    num_local_experts: int | None = layer.experts.w13.shape[0]
    if num_local_experts is not None and num_local_experts < decoder.config.num_experts_per_tok:
        # The audit routes a token to as many different experts; it makes up the weights of more of them.
        del weights["w13"], weights["w2"]
        num_local_experts = None
    shapes = model_shapes(decoder.local, decoder.dtype, num_local_experts)
    if decoder.tensor_parallel.size > 1:
        parts = 1 if decoder.adds_shards else PARTS["row"]
        shapes = replace(
            shapes,
            vocab_share=decoder.lm_head.shape[0],
            o_proj_share=(layer.o_proj.shape[0], layer.o_proj.shape[1], parts),
        )
    with torch.inference_mode():
        count = audit_short(
            shapes,
            decoder.schedules,
            decoder.device,
            weights,
            pdl=decoder.pdl,
        )
    logger.info(
        "%d comparisons of schedules with the canonical ones are equal (%.1f s)",
        count,
        time.perf_counter() - start_s,
    )
    return AuditReport(num_comparisons=count)
