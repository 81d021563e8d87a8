"""What the engine is told at start; composed into the command lines by ``moe_runtime.config``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moe_runtime.engine.request import SEED_MAX, SEED_MIN
from moe_runtime.eplb.load_window import NUM_BUCKETS

__all__ = ["MAX_SPECULATIVE_TOKENS", "EngineConfig"]

MAX_SPECULATIVE_TOKENS = 16
DEFAULT_SPECULATIVE_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's settings.

    Attributes:
        model: Folder of a checkpoint, a hub id, or ``builtin``.
        load_format: ``auto`` reads the checkpoint; ``dummy`` fills random weights from (tensor name, seed).
        dtype: Model dtype; ``auto`` takes the checkpoint's.
        device: ``auto`` takes GPUs, one per rank, where there are any, else the CPU.
        max_model_len: Most tokens of prompt and output together; by default the model's own context length.
        max_num_seqs: Most sequences that a rank runs at once.
        max_num_batched_tokens: Most tokens that a rank runs in a step; longer prompts are run in chunks.
        kv_cache_blocks: KV blocks of 64 tokens per rank; by default as many as the sequences need, up to 256 MiB on the
            CPU, up to what is free on a GPU.
        prefix_cache: Compute keys and values of equal beginnings once, by blocks of 64 tokens, and keep them as long as
            there is room. Changes no bit.
        gpu_memory_utilization: Share of the GPU's free memory that may be used.
        enforce_eager: Launch every kernel by itself, without CUDA graphs.
        overlap: Plan the next step while one runs: ``on``, ``off``, or ``auto``, on where the device runs by itself
            (GPUs). Off with ``tp`` above 1. It changes no bit.
        audit_cache: Folder where ``moe-runtime audit`` keeps its results; by default moe-runtime in the user's cache
            folder.
        dispatcher: What moves rows between ranks: ``collective`` (torch.distributed), ``symmetric`` (memory that all
            ranks of one host see), or ``auto``, the second where all ranks can; ``loopback``: this one process plays
            ``loopback_ranks`` ranks; ``deepep``: DeepEP between GPUs, where it is installed, without CUDA graphs.
            The same bits by each.
        tp: Consecutive ranks that share the attention, dense layers and vocabulary of one batch; the number of ranks
            must be a multiple. At level ``topology`` it changes no bit.
        loopback_ranks: Virtual ranks of the loopback dispatcher.
        invariance: ``topology``: a request's bits depend on nothing but the request, on any number of ranks.
            ``batch``: the same for one fixed deployment. Several ranks then pre-sum the slots that each holds, so
            that fewer bytes travel; bits depend on their number.
        num_redundant_experts: Physical experts of every layer beyond one per logical expert, to spread the load of
            those that many tokens choose; copies change no bit. Level ``batch`` then adds at the home rank.
        initial_placement: A placement file (docs/eplb.md) that says which rank holds which experts; by default
            consecutive ids.
        rearrange_interval: Steps between moves of experts that even out the load while serving; 0 for none but those
            asked for. Moving changes no bit. Level ``batch`` then adds at the home rank.
        load_window_steps: Steps whose expert load moves are planned by and ``/expert_load`` shows; up to 16, or a
            multiple of 16.
        rearrange_target: Balancedness (mean over peak load of the ranks) that a move reaches in each layer where it
            can, in (0, 1]; layers that have it stay.
        speculative: Where several tokens of a sequence may come from one step: ``ngram`` drafts what followed the same
            tokens before, ``draft`` asks a small model. Every draft is checked by this model, so that no bit changes.
        num_speculative_tokens: Most drafts of a sequence in a step, in [1, 16]; by default 4.
        draft_model: The small model of ``speculative draft``, as ``model``: of the same vocabulary. Each rank that
            samples holds all of it.
        seed: Seeds dummy weights, and the seeds given to requests that bring none; by default those are random.
    """

    model: str = "builtin"
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    kv_cache_blocks: int | None = None
    prefix_cache: bool = True
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    overlap: Literal["auto", "on", "off"] = "auto"
    audit_cache: str | None = None
    dispatcher: Literal["auto", "collective", "symmetric", "loopback", "deepep"] = "auto"
    loopback_ranks: int = 8
    tp: int = 1
    invariance: Literal["topology", "batch"] = "topology"
    num_redundant_experts: int = 0
    initial_placement: str | None = None
    rearrange_interval: int = 0
    load_window_steps: int = 1024
    rearrange_target: float = 0.95
    speculative: Literal["off", "ngram", "draft"] = "off"
    num_speculative_tokens: int | None = None
    draft_model: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_blocks",
            "loopback_ranks",
            "tp",
            "load_window_steps",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        for name in ("num_redundant_experts", "rearrange_interval"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0")
        if self.load_window_steps > NUM_BUCKETS and self.load_window_steps % NUM_BUCKETS:
            raise ValueError(
                f"load_window_steps ({self.load_window_steps}) must be at most {NUM_BUCKETS} or a multiple of it"
            )
        if not 0.001 <= self.rearrange_target <= 1:
            raise ValueError(f"rearrange_target ({self.rearrange_target}) must be in [0.001, 1]")
        self._check_speculation()
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization ({self.gpu_memory_utilization}) must be in (0, 1]")
        if self.seed is not None and not SEED_MIN <= self.seed <= SEED_MAX:
            raise ValueError(f"seed ({self.seed}) must be in [{SEED_MIN}, {SEED_MAX}]")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), or running sequences could starve"
            )

    @property
    def most_drafts(self) -> int:
        """Most drafts of a sequence in a step."""
        if self.speculative == "off":
            return 0
        return self.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS

    def _check_speculation(self) -> None:
        num = self.num_speculative_tokens
        if num is not None and self.speculative == "off":
            raise ValueError(f"num_speculative_tokens ({num}) must be left out with speculative (off)")
        if num is not None and not 1 <= num <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(f"num_speculative_tokens ({num}) must be in [1, {MAX_SPECULATIVE_TOKENS}]")
        if (self.draft_model is not None) != (self.speculative == "draft"):
            rule = "be given" if self.speculative == "draft" else "be left out"
            raise ValueError(
                f"draft_model ({self.draft_model}) must {rule} with speculative ({self.speculative})"
            )
