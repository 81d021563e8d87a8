"""Tiny Llama models in GGUF, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

__all__ = ["TEMPLATE", "dense_tensors", "write_gguf"]

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("\u0120", "the"), ("1", "2"))
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"


def alphabet() -> list[str]:
    """GPT-2's characters for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]


def dense_tensors(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """A random dense model by Hugging Face's names."""
    random = np.random.default_rng(seed)
    shapes = {
        "model.embed_tokens": (len(SPECIAL) + 256 + len(MERGES), HIDDEN),
        "model.norm": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm": (HIDDEN,),
            f"{prefix}.post_attention_layernorm": (HIDDEN,),
            f"{prefix}.self_attn.q_proj": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"{prefix}.self_attn.v_proj": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"{prefix}.self_attn.o_proj": (HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj": (INNER, HIDDEN),
            f"{prefix}.mlp.up_proj": (INNER, HIDDEN),
            f"{prefix}.mlp.down_proj": (HIDDEN, INNER),
        }
    return {
        f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
    }


def write_gguf(path: Path, tensors: dict[str, NDArray[np.float32]], *, architecture: str = "llama") -> Path:
    """Write a model; matrices of layers as Q8_0. Skips the test where gguf is not installed."""
    gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra demo)")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [*SPECIAL, *alphabet(), *("".join(merge) for merge in MERGES)]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in tensors.items():
        stored = _stored_name(name)
        if "q_proj" in name or "k_proj" in name:
            heads = HEADS if "q_proj" in name else KV_HEADS
            values = (
                values.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(values.shape)
            )  # as converters do
        if "layers" in name and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored_name(name: str) -> str:
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("model.layers", "blk"),
        ("self_attn.o_proj", "attn_output"), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"), ("post_attention_layernorm", "ffn_norm"), ("input_layernorm", "attn_norm"),
        ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"),
    ):  # fmt: skip
        name = name.replace(ours, theirs)
    return name
