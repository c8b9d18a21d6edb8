"""The presets: shapes of models by their usual names.

GPT-2 small and the smaller 70M and 31M (Pythia's widths and depths); GPT-3 (Brown et al. 2020, table 2.1) and a 10B
between; Llama 2 (7B) and Llama 3 (8B, 70B, 405B); mixtures of experts by their own names. A preset may set any option
of the model; what is typed beside it counts.
"""

from __future__ import annotations

_LLAMA: dict[str, object] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
_LLAMA_3: dict[str, object] = {**_LLAMA, "seq_length": 8192, "rotary_base": 500_000, "num_query_groups": 8}
_MIXTURE: dict[str, object] = {**_LLAMA, "seq_length": 4096}

PRESETS: dict[str, dict[str, object]] = {
    "31M": {"num_layers": 6, "hidden_size": 256, "num_attention_heads": 8, "seq_length": 2048},
    "70M": {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 2048},
    "124M": {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024},
    "350M": {"num_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 2048},
    "760M": {"num_layers": 24, "hidden_size": 1536, "num_attention_heads": 16, "seq_length": 2048},
    "1.3B": {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048},
    "2.7B": {"num_layers": 32, "hidden_size": 2560, "num_attention_heads": 32, "seq_length": 2048},
    "6.7B": {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048},
    "7B": {
        **_LLAMA,
        **{"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096},
        "ffn_hidden_size": 11008,
    },
    "8B": {
        **_LLAMA_3,
        **{"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336},
    },
    "10B": {"num_layers": 50, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 2048},
    "13B": {"num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "seq_length": 2048},
    "70B": {
        **_LLAMA_3,
        **{"num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "ffn_hidden_size": 28672},
    },
    "175B": {"num_layers": 96, "hidden_size": 12288, "num_attention_heads": 96, "seq_length": 2048},
    "405B": {
        **_LLAMA_3,
        **{"num_layers": 126, "hidden_size": 16384, "num_attention_heads": 128, "ffn_hidden_size": 53248},
    },
    "OLMoE-1B-7B": {
        **_MIXTURE,
        **{"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 16, "ffn_hidden_size": 1024},
        **{"num_experts": 64, "moe_router_topk": 8, "moe_ffn_hidden_size": 1024, "moe_router_pre_softmax": True},
        **{"qk_layernorm": True, "qk_layernorm_scope": "width"},
    },
    "Qwen3-30B-A3B": {
        **_MIXTURE,
        **{"num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "ffn_hidden_size": 6144},
        **{"num_query_groups": 4, "kv_channels": 128, "rotary_base": 1_000_000, "norm_epsilon": 1e-6},
        **{"num_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "qk_layernorm": True},
    },
    "Mixtral-8x7B": {
        **_MIXTURE,
        **{"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14336},
        **{"num_query_groups": 8, "rotary_base": 1_000_000, "num_experts": 8, "moe_ffn_hidden_size": 14336},
    },
    "gpt-oss-20B": {
        **{"num_layers": 24, "hidden_size": 2880, "num_attention_heads": 64, "ffn_hidden_size": 2880},
        **{"num_query_groups": 8, "kv_channels": 64, "seq_length": 4096, "normalization": "RMSNorm"},
        **{"window_size": 128, "window_pattern": "SF", "softmax_type": "learnable", "attention_dropout": 0.0},
        **{"position_embedding_type": "rope", "rotary_base": 150_000, "rope_scaling_type": "yarn"},
        **{"rope_scaling_factor": 32.0, "original_max_position_embeddings": 4096},
        **{"yarn_correction_range_round_to_int": False, "untie_embeddings_and_output_weights": True},
        **{"num_experts": 32, "moe_router_topk": 4, "moe_ffn_hidden_size": 2880, "mlp_activation": "quick_geglu"},
        **{"activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
    },
}
