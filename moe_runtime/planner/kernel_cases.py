"""Kernels of the engine as they are timed: real shapes, schedules, block tables, and what each must move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from moe_runtime.kernels.attention_tiles import make_row_tiles
from moe_runtime.kernels.attention_tree_triton import TREE, AttentionTree, attention_work
from moe_runtime.kernels.attention_triton import attend_decode, decode_workspace
from moe_runtime.kernels.gemm import PARTS
from moe_runtime.kernels.gemm_triton import dense_gemm, dense_gemm_parts
from moe_runtime.kernels.gpu_schedules import GpuSchedules, device_kind
from moe_runtime.kernels.norm_triton import combine_residual_norm, embed_norm, merge_residual_norm
from moe_runtime.kernels.prefill_attention_triton import attend_rows
from moe_runtime.kernels.rope_write_triton import rope_and_write
from moe_runtime.kernels.router_triton import router_logits
from moe_runtime.kernels.sampling import RowSampling
from moe_runtime.kernels.sampling_triton import SamplingRows, greedy, sample
from moe_runtime.kernels.softmax_triton import log_softmax_stats
from moe_runtime.layers.cuda_decoder import MAX_DECODE_ROWS
from moe_runtime.planner.shapes import ModelShape

__all__ = [
    "MAX_COPY_BYTES",
    "MIN_COPIES",
    "SMOKE",
    "Case",
    "Cases",
    "Launch",
    "Setting",
    "in_turn",
    "setting_of",
]

EPS = 1e-6
KV_BLOCK = 64
MAX_MODEL_LEN = 4096  # a split decode launches a program for each of its chunks
COLD_BYTES = 384 << 20  # several times L2
MAX_COPY_BYTES = 8 << 30
MIN_COPIES = 8
NUM_TOKEN_SETS = 24  # of embedding rows

Launch = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Dimensions of the model and what to measure: row counts, keys of decode rows, (sequences, tokens) of prefill."""

    hidden: int
    width: int
    num_experts: int
    num_topk: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    rows: tuple[int, ...]
    expert_rows: tuple[int, ...]
    max_head_rows: int
    contexts: tuple[int, ...]
    prefills: tuple[tuple[int, int], ...]

    @property
    def query(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv(self) -> int:
        return self.query + 2 * self.num_kv_heads * self.head_dim


SMOKE = Setting(
    hidden=64, width=32, num_experts=8, num_topk=2, num_heads=4, num_kv_heads=2, head_dim=32, vocab=300,
    rows=(1, 3, 264), expert_rows=(1, 3, 264), max_head_rows=3, contexts=(20, 520), prefills=((1, 70), (2, 150)),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one number of rows.

    Attributes:
        launches: Of distinct weights or caches.
        num_bytes, flops: What one launch must move and multiply.
        beside: Other libraries at the same shape: launches, or published microseconds.
    """

    kernel: str
    rows: int
    launches: Sequence[Launch]
    num_bytes: float
    flops: float = 0.0
    beside: Mapping[str, Sequence[Launch] | float] = field(default_factory=dict)


class Cases:
    """Makes the cases of one setting on one device."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.setting = setting
        self.device = device
        self.table = GpuSchedules(device_kind(device), torch.bfloat16)
        self.pdl = device.type == "cuda"
        self.gain = torch.ones(setting.hidden, device=device)
        self.head_gain = torch.ones(setting.head_dim, device=device)
        angles = torch.rand(MAX_MODEL_LEN, setting.head_dim // 2, device=device)
        self.cos, self.sin = angles.cos(), angles.sin()

    def layer(self) -> Iterator[Case]:
        """Kernels of a layer in order, experts aside; embedding first."""
        s = self.setting
        yield from (self.embed(m) for m in s.rows)
        yield from self.gemms("qkv", s.qkv, s.hidden)
        yield from (self.decode(m, keys) for keys in s.contexts for m in s.rows if m <= MAX_DECODE_ROWS)
        yield from (self.rope(m) for m in s.rows if m > MAX_DECODE_ROWS)
        yield from (self.prefill(*shape) for shape in s.prefills)
        yield from self.gemms("o_proj", s.hidden, s.query)
        yield from (self.merge(m) for m in s.rows)
        yield from self.gemms("router", s.num_experts, s.hidden)

    def head(self) -> Iterator[Case]:
        """Head and sampling."""
        yield from self.gemms("lm_head", self.setting.vocab, self.setting.hidden)
        yield from self.sampling()

    def gemms(self, name: str, n: int, k: int) -> Iterator[Case]:
        """One projection at every row count, beside ``torch.mm`` to bf16."""
        weights = self._copies(n, k)
        for m in self.setting.rows:
            if name != "lm_head" or m <= self.setting.max_head_rows:
                x, plain = self.normal(m, k), self.empty(m, n)
                launches, out_bytes = self._gemm(name, x, weights, PARTS["row"] if name == "o_proj" else 1)
                theirs = [partial(torch.mm, x, w.t(), out=plain) for w in weights]
                num_bytes = 2 * (k * n + m * k) + out_bytes
                yield Case(
                    kernel=name, rows=m, launches=launches, num_bytes=num_bytes, flops=2 * m * n * k,
                    beside={"cuBLAS": theirs},
                )  # fmt: skip

    def o_proj(self, m: int, parts: int) -> Case:
        """In ``parts`` or one chain; for decode rows with the kernel that adds the parts."""
        s = self.setting
        weights, x = self._copies(s.hidden, s.query), self.normal(m, s.query)
        launches: Sequence[Launch]
        if m > MAX_DECODE_ROWS:
            launches, _ = self._gemm("o_proj", x, weights, parts)
            return Case(kernel="o_proj", rows=m, launches=launches, num_bytes=0)
        branch = torch.zeros(m, parts, s.hidden, device=self.device, dtype=torch.float32)
        if parts == 1:
            branch = branch.bfloat16()
            schedule = self.table.dense(m, s.hidden, s.query)
            launches = [
                partial(dense_gemm, x, w, branch[:, 0], schedule=schedule, pdl=self.pdl) for w in weights
            ]
        else:
            launches, _ = self._gemm("o_proj", x, weights, parts, branch)
        finish = self.residual_norm(merge_residual_norm, branch)
        launches = [in_turn(launch, finish) for launch in launches]
        return Case(kernel="o_proj + merge_residual_norm", rows=m, launches=launches, num_bytes=0)

    def decode(self, m: int, context: int) -> Case:
        """Decode attention; split by the rule of the runner."""
        s = self.setting
        blocks = -(-context // KV_BLOCK)
        caches = self._copies(2, m * blocks, s.num_kv_heads, KV_BLOCK, s.head_dim, scale=1.0)
        table = torch.randperm(m * blocks, device=self.device).int().view(m, blocks)
        positions = torch.full((m,), context - 1, dtype=torch.int32, device=self.device)
        qkv, out = self.normal(m, s.qkv), self.empty(m, s.query)
        split = context > TREE.chunk_keys and m * s.num_kv_heads <= _num_multiprocessors(self.device)
        schedule = self.table.decode_attention(split=split)
        workspace = decode_workspace(m, s.num_heads, s.head_dim, MAX_MODEL_LEN, self.device)
        launches = [
            partial(
                attend_decode, qkv, cache[0], cache[1], positions, table, self.head_gain, self.head_gain, EPS,
                self.cos, self.sin, out,
                workspace=workspace, schedule=schedule, pdl=self.pdl,
            )
            for cache in caches
        ]  # fmt: skip
        flops, num_bytes = self._attention_work([context - 1] * m)
        return Case(
            kernel=f"attend_decode, {context} keys", rows=m, launches=launches,
            num_bytes=num_bytes + 2 * m * (s.qkv + s.query), flops=flops,
        )  # fmt: skip

    def prefill(self, num_seqs: int, length: int, tree: AttentionTree = TREE) -> Case:
        """Causal attention of whole sequences."""
        s = self.setting
        m, blocks = num_seqs * length, -(-length // KV_BLOCK)
        caches = self._copies(2, num_seqs * blocks, s.num_kv_heads, KV_BLOCK, s.head_dim, scale=1.0)
        table = torch.randperm(num_seqs * blocks, device=self.device).int().view(num_seqs, blocks)
        q, out = self.normal(m, s.num_heads, s.head_dim), self.empty(m, s.query)
        schedule = self.table.attention_rows(few=False)
        tiles = torch.from_numpy(
            make_row_tiles(
                [length] * num_seqs, [0] * num_seqs,
                num_groups=s.num_heads // s.num_kv_heads, block_rows=schedule.block_rows,
            )
        ).to(self.device)  # fmt: skip
        launches = [
            partial(
                attend_rows, q, cache[0], cache[1], tiles, table, out,
                schedule=schedule, pdl=self.pdl, tree=tree,
            )
            for cache in caches
        ]  # fmt: skip
        flops, _ = self._attention_work(range(length))
        return Case(
            kernel=f"attend_rows, {num_seqs} x {length}", rows=m, launches=launches,
            num_bytes=2 * m * (2 * s.query + 2 * s.num_kv_heads * s.head_dim), flops=num_seqs * flops,
        )  # fmt: skip

    def rope(self, m: int) -> Case:
        """q/k norm, RoPE and cache write of a mixed step."""
        s = self.setting
        cache = self.empty(2, -(-m // KV_BLOCK), s.num_kv_heads, KV_BLOCK, s.head_dim)
        positions = torch.arange(m, device=self.device, dtype=torch.int32) % 2048
        launch = partial(
            rope_and_write, self.normal(m, s.qkv), positions, torch.arange(m, device=self.device),
            self.head_gain, self.head_gain, EPS, self.cos, self.sin, cache[0], cache[1],
            self.empty(m, s.num_heads, s.head_dim), schedule=self.table.rope(), pdl=self.pdl,
        )  # fmt: skip
        num_bytes = 4 * m * s.qkv + 4 * min(m, 2048) * s.head_dim
        return Case(kernel="rope_and_write", rows=m, launches=[launch], num_bytes=num_bytes)

    def embed(self, m: int) -> Case:
        """The first kernel of a step, launched plainly."""
        s = self.setting
        table, out = self.normal(s.vocab, s.hidden), (self.empty(m, s.hidden), self.empty(m, s.hidden))
        launches = []
        for _ in range(NUM_TOKEN_SETS):
            token_ids = torch.randint(0, s.vocab, (m,), device=self.device, dtype=torch.int32)
            launches.append(partial(embed_norm, token_ids, table, self.gain, EPS, *out))
        return Case(kernel="embed_norm", rows=m, launches=launches, num_bytes=6 * m * s.hidden)

    def merge(self, m: int) -> Case:
        """Over parts in fp32 for decode rows, over the rounded branch above them."""
        s = self.setting
        branch = self.normal(m, 1, s.hidden)
        if m <= MAX_DECODE_ROWS:
            branch = self.normal(m, PARTS["row"], s.hidden).float()
        launch = self.residual_norm(merge_residual_norm, branch)
        num_bytes = branch.numel() * branch.element_size() + 6 * m * s.hidden
        return Case(kernel="merge_residual_norm", rows=m, launches=[launch], num_bytes=num_bytes)

    def combine(self, m: int) -> Case:
        """Over a token's expert rows."""
        s = self.setting
        launch = self.residual_norm(combine_residual_norm, self.normal(m, s.num_topk, s.hidden))
        num_bytes = 2 * m * s.hidden * (s.num_topk + 3)
        return Case(kernel="combine_residual_norm", rows=m, launches=[launch], num_bytes=num_bytes)

    def sampling(self) -> Iterator[Case]:
        """Logits to tokens and logprobs; of the engine's calls only greedy in decode is launched dependent."""
        s = self.setting
        for m in (m for m in s.rows if m <= s.max_head_rows):
            logits = 3.0 * torch.randn(m, s.vocab, device=self.device)
            out = torch.zeros(m, dtype=torch.int32, device=self.device)
            row_settings = [RowSampling(seed=i, top_k=20, top_p=0.95, temperature=0.6) for i in range(m)]
            settings = SamplingRows.of(row_settings, self.device)
            kernels: dict[str, tuple[Launch, dict[str, Sequence[Launch] | float]]] = {
                "greedy": (
                    partial(greedy, logits, out, pdl=self.pdl),
                    {"torch.argmax": [partial(torch.argmax, logits, dim=1)]},
                ),
                "log_softmax_stats": (
                    partial(log_softmax_stats, logits),
                    {"torch.logsumexp": [partial(torch.logsumexp, logits, dim=1)]},
                ),
                "sample, top-k 20, top-p 0.95": (partial(sample, logits, settings, out), {}),
            }
            for name, (launch, beside) in kernels.items():
                num_bytes = 4 * m * s.vocab
                yield Case(kernel=name, rows=m, launches=[launch], num_bytes=num_bytes, beside=beside)

    def _gemm(
        self, name: str, x: torch.Tensor, weights: Sequence[torch.Tensor], parts: int,
        parts_out: torch.Tensor | None = None,
    ) -> tuple[list[Launch], int]:  # fmt: skip
        """Launches as ``CudaDecoder`` makes them, and bytes of the output."""
        m, (n, k) = x.shape[0], weights[0].shape
        wide = partial(torch.empty, dtype=torch.float32, device=self.device)
        if name == "o_proj" and parts > 1 and m <= MAX_DECODE_ROWS:
            out = wide(m, parts, n) if parts_out is None else parts_out
            call = partial(dense_gemm_parts, schedule=self.table.dense_parts(m, n, k, parts))
        elif name == "router":
            out = wide(m, n)
            call = partial(router_logits, schedule=self.table.router(m, k))
        else:
            out = wide(m, n) if name == "lm_head" else self.empty(m, n)
            call = partial(dense_gemm, parts=parts, schedule=self.table.dense(m, n, k, parts))
        return [partial(call, x, w, out, pdl=self.pdl) for w in weights], out.numel() * out.element_size()

    def residual_norm(self, kernel: Callable[..., None], branch: torch.Tensor) -> Launch:
        m, hidden = branch.shape[0], self.setting.hidden
        out = (self.empty(m, hidden), self.empty(m, hidden))
        return partial(kernel, branch, self.normal(m, hidden), self.gain, EPS, *out, pdl=self.pdl)

    def _attention_work(self, positions: Sequence[int]) -> tuple[int, int]:
        s = self.setting
        return attention_work(
            positions,
            num_query_heads=s.num_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            window=None,
        )

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=self.device)

    def normal(self, *shape: int, scale: float = 0.02) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0.0, scale)

    def _copies(self, *shape: int, scale: float = 0.02) -> list[torch.Tensor]:
        """As many as exceed L2 together."""
        copy_bytes = 2 * math.prod(shape)
        num = min(max(MIN_COPIES, -(-COLD_BYTES // copy_bytes)), max(1, MAX_COPY_BYTES // copy_bytes))
        return list(self.normal(2 if self.setting is SMOKE else num, *shape, scale=scale).unbind(0))


def setting_of(shape: ModelShape) -> Setting:
    """What is measured of a model."""
    attention = shape.attention
    return Setting(
        hidden=shape.hidden,
        width=shape.expert_width,
        num_experts=shape.num_experts,
        num_topk=shape.num_topk,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        vocab=shape.vocab,
        rows=(1, 8, 32, 128, 512, 4096, 16384),
        expert_rows=(1, 8, 32, 128, 512, 4096, 8192, 16384),
        max_head_rows=128,
        contexts=(200, 2500),
        prefills=((1, 512), (2, 2048), (8, 2048)),
    )


def in_turn(*launches: Launch) -> Launch:
    """All of them as one."""

    def launch_all() -> None:
        for launch in launches:
            launch()

    return launch_all


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
