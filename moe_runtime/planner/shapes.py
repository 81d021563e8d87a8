"""A model as the planner sees it: how many elements each part has and how wide they are stored. Imports no torch.

Counting is arithmetic on the dimensions of ``config.json``; ``shape_configs.py`` reads them. What the engine runs is
counted here as its own loader counts it (``registry.tensor_specs``), which a test compares to the last element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["AttentionShape", "ItemBytes", "ModelShape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention of one layer; the same in all layers but for the window.

    Attributes:
        kind: ``gqa``: query heads share key-value heads; ``mla``: keys and values are expanded from one latent row.
        num_heads, num_kv_heads: Heads; with ``mla`` the cache has one row for all.
        head_dim: Of a query and key; with ``mla`` without the rotary part.
        bias: Of q, k, v; o_bias of the output projection.
        qk_norm: RMSNorm of each query and key head.
        sinks: One learned logit per head.
        q_lora_rank, kv_lora_rank, rope_dim, v_head_dim: ``mla``; a ``q_lora_rank`` of 0 is a plain query projection.
        windows: Per layer, keys that a query sees, or None for all.
    """

    kind: Literal["gqa", "mla"] = "gqa"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    rope_dim: int = 0
    v_head_dim: int = 0
    windows: tuple[int | None, ...] = ()

    @property
    def query_width(self) -> int:
        """Elements of a token's queries, over all heads."""
        return self.num_heads * (self.head_dim + self.rope_dim)

    @property
    def output_width(self) -> int:
        """Elements that enter the output projection."""
        return self.num_heads * (self.v_head_dim or self.head_dim)

    @property
    def cache_width(self) -> int:
        """Elements that a token leaves in the cache of one layer."""
        if self.kind == "mla":
            return self.kv_lora_rank + self.rope_dim
        return 2 * self.num_kv_heads * self.head_dim

    def shared_elements(self, hidden: int) -> int:
        """Weights of a layer that the ranks of a tensor-parallel group share evenly (by query heads)."""
        if self.kind == "mla":
            query = (self.q_lora_rank or hidden) * self.query_width
            expand = self.kv_lora_rank * self.num_heads * (self.head_dim + self.v_head_dim)
            return query + expand + self.output_width * hidden
        query = hidden * self.query_width + (self.query_width if self.bias else 0)
        return query + self.output_width * hidden + (self.num_heads if self.sinks else 0)

    def kv_elements(self, hidden: int) -> int:
        """Weights of a layer that follow the key-value heads."""
        if self.kind == "mla":
            return 0
        width = 2 * self.num_kv_heads * self.head_dim
        return width * hidden + (width if self.bias else 0)

    def whole_elements(self, hidden: int) -> int:
        """Weights of a layer that every rank keeps whole: norms, biases of the output, latent projections."""
        whole = (hidden if self.o_bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        if self.kind == "mla":
            latent = hidden * (self.kv_lora_rank + self.rope_dim) + self.kv_lora_rank
            whole += latent + (self.q_lora_rank * (hidden + 1))
        return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemBytes:
    """Bytes per stored element, scales included: fp8 with 128 x 128 blocks is 1 + 4 / 16384, mxfp4 4.25 / 8."""

    expert: float
    dense: float
    other: float
    kv: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a model.

    Attributes:
        architecture: Name in ``config.json``.
        dtype: Of activations.
        num_layers, hidden, vocab, tied: Of the decoder; ``tied``: the head is the embedding.
        attention: Of a layer.
        num_moe_layers: Layers with experts; the others have a dense MLP of ``dense_width``.
        num_experts, num_topk, expert_width: Routed experts of a layer.
        shared_width: Width of the experts that every token visits, all of them together; 0 for none.
        router_bias, expert_bias: Elements of bias a layer's router has, and whether experts have biases.
        item_bytes: Stored width of each kind of weight, and of the cache.
        max_model_len: Longest context, in tokens.
        not_run_reason: Why this version of the engine does not run the model; empty where it does.
    """

    architecture: str
    dtype: Literal["float32", "bfloat16"]
    num_layers: int
    hidden: int
    vocab: int
    tied: bool
    attention: AttentionShape
    num_moe_layers: int
    dense_width: int
    num_experts: int
    num_topk: int
    expert_width: int
    shared_width: int = 0
    router_bias: int = 0
    expert_bias: bool = False
    item_bytes: ItemBytes
    max_model_len: int
    not_run_reason: str = ""
    norms_per_layer: int = field(default=2)

    @property
    def runs_here(self) -> bool:
        """Whether this version of the engine runs the model."""
        return not self.not_run_reason

    @property
    def activation_bytes(self) -> int:
        """Bytes of an activation's element."""
        return 4 if self.dtype == "float32" else 2

    @property
    def num_dense_layers(self) -> int:
        """Layers without experts."""
        return self.num_layers - self.num_moe_layers

    @property
    def expert_elements(self) -> int:
        """Of one routed expert of one layer."""
        bias = 2 * self.expert_width + self.hidden if self.expert_bias else 0
        return 3 * self.hidden * self.expert_width + bias

    def elements(self) -> Mapping[str, int]:
        """Elements of each part, over all layers: ``experts``, ``shared_experts``, ``dense_mlp``, ``attention``,
        ``attention_kv``, ``attention_whole``, ``routers``, ``norms``, ``embedding``, ``head``."""
        hidden, attention, layers, moe = self.hidden, self.attention, self.num_layers, self.num_moe_layers
        return {
            "experts": moe * self.num_experts * self.expert_elements,
            "shared_experts": moe * 3 * hidden * self.shared_width,
            "dense_mlp": self.num_dense_layers * 3 * hidden * self.dense_width,
            "attention": layers * attention.shared_elements(hidden),
            "attention_kv": layers * attention.kv_elements(hidden),
            "attention_whole": layers * attention.whole_elements(hidden),
            "routers": moe * (self.num_experts * hidden + self.router_bias),
            "norms": (layers * self.norms_per_layer + 1) * hidden,
            "embedding": self.vocab * hidden,
            "head": 0 if self.tied else self.vocab * hidden,
        }

    @property
    def num_parameters(self) -> int:
        """All of them."""
        return sum(self.elements().values())

    @property
    def num_active_parameters(self) -> int:
        """Those that one token meets; of the embedding one row, so none."""
        elements = self.elements()
        idle = elements["experts"] // max(1, self.num_experts) * (self.num_experts - self.num_topk)
        return self.num_parameters - idle - (0 if self.tied else elements["embedding"])

    def weight_bytes(self, num_slots: int | None = None, tp: int = 1, item_bytes: float | None = None) -> int:
        """Bytes of weights on the rank with most of them.

        Args:
            num_slots: Physical experts of a layer on the rank; all logical ones by default.
            tp: Ranks that share attention, dense layers, embedding and head.
            item_bytes: Of every element, whatever the checkpoint's width; the CPU path packs fp32.
        """
        elements = self.elements()
        slots = self.num_experts if num_slots is None else num_slots
        heads = self.attention.num_kv_heads
        kv = elements["attention_kv"]
        shares = {
            "expert": self.num_moe_layers * slots * self.expert_elements,
            "dense": _cut(elements["shared_experts"], self.shared_width, tp)
            + _cut(elements["dense_mlp"], self.dense_width, tp)
            + elements["attention"] // tp
            + (kv // heads * max(1, heads // tp) if heads else kv)
            + elements["attention_whole"],
            "other": elements["routers"]
            + elements["norms"]
            + _cut(elements["embedding"], self.vocab, tp)
            + _cut(elements["head"], self.vocab, tp),
        }
        widths = {
            "expert": self.item_bytes.expert,
            "dense": self.item_bytes.dense,
            "other": self.item_bytes.other,
        }
        return round(sum(n * (item_bytes or widths[name]) for name, n in shares.items()))

    def kv_token_bytes(self, tp: int = 1) -> int:
        """Bytes that a token takes in the caches of all layers of a rank. Windows mask and free nothing."""
        attention = self.attention
        width = attention.cache_width
        if attention.kind == "gqa":
            width = width // attention.num_kv_heads * max(1, attention.num_kv_heads // tp)
        return round(self.num_layers * width * self.item_bytes.kv)


def _cut(elements: int, width: int, tp: int) -> int:
    """The widest of ``tp`` shares of a tensor cut along a dimension of ``width``."""
    return elements // width * -(-width // tp) if width else 0
