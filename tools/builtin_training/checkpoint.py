"""The Hugging Face folder: written, read again, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from builtin_training.model import BuiltinModel, Layer, ModelShape
from builtin_training.tokenizer import END_OF_TEXT, IM_END, IM_START, SPECIAL_TOKENS, special_id

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('roles are system, user and assistant, not ' + message['role']) }}"
    "{%- endif %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def export_model(model: BuiltinModel, tokenizer: Tokenizer, output: Path, aux_loss_coef: float) -> None:
    """Writes the Hugging Face folder: weights in bfloat16 under the published names, tokenizer and configuration."""
    output.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.to("cpu", torch.bfloat16).contiguous() for name, value in published_tensors(model).items()
    }
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "model.safetensors").chmod(0o644)
    end_id, start_id, stop_id = (special_id(tokenizer, token) for token in SPECIAL_TOKENS)
    shape = model.shape
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": end_id,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": stop_id,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.num_experts_per_tok * shape.moe_intermediate_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "max_window_layers": shape.num_hidden_layers,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": shape.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": shape.num_attention_heads,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_experts_per_tok,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "output_router_logits": False,
        "pad_token_id": end_id,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "router_aux_loss_coef": aux_loss_coef,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab_size,
    }
    generation = {
        "bos_token_id": end_id,
        "do_sample": True,
        "eos_token_id": [stop_id, end_id],
        "pad_token_id": end_id,
        "temperature": 0.8,
        "top_p": 0.95,
        "transformers_version": "4.57.0",
    }
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {
        str(i): {"content": t, **flags}
        for i, t in zip((end_id, start_id, stop_id), SPECIAL_TOKENS, strict=True)
    }
    tokenizer_config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [IM_START, IM_END],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": IM_END,
        "model_max_length": shape.max_position_embeddings,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    files = {"config": config, "generation_config": generation, "tokenizer_config": tokenizer_config}
    for name, content in files.items():
        (output / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    tokenizer.save(str(output / "tokenizer.json"), pretty=False)


def published_tensors(model: BuiltinModel) -> dict[str, Tensor]:
    """Returns views of the weights under the published names, one tensor per expert matrix."""
    E, I = model.shape.num_experts, model.shape.moe_intermediate_size  # noqa: E741
    tensors = {
        "model.embed_tokens.weight": model.embed.weight.data,
        "model.norm.weight": model.norm.weight.data,
    }
    for n, layer in enumerate(model.layers):
        assert isinstance(layer, Layer), "layers hold Layer modules only"
        prefix = f"model.layers.{n}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = getattr(layer, name).weight.data
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = getattr(layer, name).weight.data
        tensors[f"{prefix}mlp.gate.weight"] = layer.router.weight.data
        for e in range(E):
            part = slice(e * I, (e + 1) * I)
            tensors[f"{prefix}mlp.experts.{e}.gate_proj.weight"] = layer.gate.weight.data[part]
            tensors[f"{prefix}mlp.experts.{e}.up_proj.weight"] = layer.up.weight.data[part]
            tensors[f"{prefix}mlp.experts.{e}.down_proj.weight"] = layer.down.weight.data[:, part]
    return tensors


def load_exported(folder: Path) -> tuple[BuiltinModel, Tokenizer]:
    """Loads an exported folder into the plain model, in float32 (the values are those of the bfloat16 file)."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    shape = ModelShape(**{name: config[name] for name in ModelShape.__dataclass_fields__})
    model = BuiltinModel(shape).eval()
    stored, wanted = load_file(folder / "model.safetensors"), published_tensors(model)
    if stored.keys() != wanted.keys():
        raise ValueError(
            f"tensor names of {folder} differ from the published ones: {stored.keys() ^ wanted.keys()}"
        )
    for name, value in stored.items():
        wanted[name].copy_(value)
    return model, Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.no_grad()
def compare_with_transformers(folder: Path, model: BuiltinModel, ids_BT: Tensor) -> float:
    """Returns the relative error ``|ours - theirs| / |theirs|`` of float32 logits against transformers."""
    from transformers import Qwen3MoeForCausalLM

    theirs = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    logits = theirs.train(False)(ids_BT).logits
    return float((model(ids_BT)[0] - logits).norm() / logits.norm())
