"""A dense Llama model in a GGUF file, as Hugging Face's layout names and orders it. The one module that imports gguf.

Weights come dequantised, in fp32. The file keeps the rows of q_proj and k_proj in pairs of a rotation, (0, 1), (2, 3),
...; Hugging Face rotates (0, d/2), (1, d/2 + 1), ..., so for a head of 4 rows it has the file's rows 0, 2, 1, 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from moe_runtime.errors import CheckpointError

__all__ = ["GgufLlama", "rotation_halves"]

CONTROL_TOKEN = 3
NORMAL_TOKEN = 1

_TENSORS: Mapping[str, str] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_TENSORS: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufLlama:
    """An open file.

    Attributes:
        num_layers: Number of decoder layers.
        ties_embeddings: Whether the head is the embedding.
        chat_template: Jinja source.

    Args:
        path: The file.

    Raises:
        ValueError: the package gguf is not installed.
        CheckpointError: it is no such file, or holds another kind of model or tokenizer.
    """

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise ValueError("reading GGUF needs the package gguf: pip install 'moe-runtime[demo]'") from None
        self.path = path
        self._dequantize = gguf.quants.dequantize
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path} cannot be read as GGUF: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        for key, value in (
            ("general.architecture", "llama"),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ):
            if self._field(key) != value:
                raise CheckpointError(f"{path}: {key} ({self._field(key)}) must be {value}")
        self.num_layers = int(self._field("llama.block_count"))
        self.ties_embeddings = "output.weight" not in self._tensors
        self.chat_template = str(self._field("tokenizer.chat_template"))

    def config(self) -> dict[str, Any]:
        """What Hugging Face's config.json of the dense model says, without its name and dtype."""
        return {
            "bos_token_id": int(self._field("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(self._field("tokenizer.ggml.eos_token_id")),
            "hidden_act": "silu",
            "hidden_size": int(self._field("llama.embedding_length")),
            "intermediate_size": int(self._field("llama.feed_forward_length")),
            "max_position_embeddings": int(self._field("llama.context_length")),
            "num_attention_heads": self._num_heads("q_proj"),
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self._num_heads("k_proj"),
            "rms_norm_eps": _shortest(self._field("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self._field("llama.rope.freq_base")),
            "tie_word_embeddings": self.ties_embeddings,
            "vocab_size": len(self._field("tokenizer.ggml.tokens")),
        }

    def read(self, name: str) -> NDArray[np.float32]:
        """A tensor by its name in Hugging Face's layout.

        Raises:
            CheckpointError: the file has none.
        """
        stored = _TENSORS.get(name, "")
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name):
            stored = f"blk.{match[1]}.{_LAYER_TENSORS.get(match[2], '')}.weight"
        if stored not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor for {name}")
        tensor = self._tensors[stored]
        values: NDArray[np.float32] = self._dequantize(tensor.data, tensor.tensor_type).astype(
            np.float32, copy=False
        )
        for projection in ("q_proj", "k_proj"):
            if f".{projection}." in name:
                return rotation_halves(values, self._num_heads(projection))
        return values

    def special_tokens(self) -> dict[str, str]:
        """Named special tokens."""
        tokens = self._field("tokenizer.ggml.tokens")
        fields = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        return {
            name: tokens[int(self._field(f"tokenizer.ggml.{key}_token_id"))] for name, key in fields.items()
        }

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Byte-level BPE, digits one by one, control tokens as special tokens."""
        tokens: list[str] = self._field("tokenizer.ggml.tokens")
        kinds: list[int] = self._field("tokenizer.ggml.token_type")
        if set(kinds) - {NORMAL_TOKEN, CONTROL_TOKEN}:
            raise CheckpointError(
                f"{self.path}: tokenizer.ggml.token_type must be normal or control for every token"
            )
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(
            [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
        )
        return tokenizer

    def _num_heads(self, projection: str) -> int:
        suffix = "_kv" if projection == "k_proj" else ""
        return int(self._field(f"llama.attention.head_count{suffix}"))

    def _field(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise CheckpointError(f"{self.path} has no {key}")
        return field.contents()


def rotation_halves(rows: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q_proj or k_proj from pairs of a rotation to halves, head by head: 0, 2, 1, 3 for a head of 4 rows.

    Args:
        rows: ``[num_heads * head_dim, hidden]``.
        num_heads: Heads.
    """
    num_rows, hidden = rows.shape
    pairs = rows.reshape(num_heads, num_rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(num_rows, hidden)


def _shortest(value: float) -> float:
    """What was written as a float32: 9.99999974e-06 is 1e-05."""
    return float(str(np.float32(value)))
