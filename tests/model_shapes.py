"""Published dimensions of large models, as their ``config.json`` gives them, for tests of the planner."""

from __future__ import annotations

from typing import Any

__all__ = ["DEEPSEEK_V3", "GLM_4_5", "GPT_OSS_120B", "MIXTRAL_8X7B", "QWEN3_30B_A3B", "QWEN3_235B_A22B"]

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "vocab_size": 151936, "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_235B_A22B = QWEN3_30B_A3B | {
    "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_attention_heads": 64,
    "num_hidden_layers": 94,
}  # fmt: skip
MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "vocab_size": 129280, "max_position_embeddings": 163840,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
    "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "max_position_embeddings": 131072,
    "quantization_config": {"quant_method": "mxfp4"}, "tie_word_embeddings": False,
}  # fmt: skip
GLM_4_5: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 92, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "vocab_size": 151552, "attention_bias": True, "use_qk_norm": True, "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}  # fmt: skip
