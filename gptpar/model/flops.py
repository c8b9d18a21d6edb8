"""Counts a GPT's floating-point operations and its MFU, from its shape; has the peaks of GPUs.

Two definitions of a model's FLOPs are in use: attention over the whole square (PaLM, arXiv 2204.02311 appendix B;
nanoGPT, torchtitan) or over its causal half (Megatron-LM since 2025, llm.c). The utilisations that they give differ by
2 to 15 %. This file has both, and the argument ``causal`` says which.
"""

from __future__ import annotations

import re

from gptpar.config import ModelConfig


def query_width(model: ModelConfig) -> int:
    """Width of all query heads together, which is also the width of attention's output."""
    return model.num_attention_heads * model.kv_channels


def qkv_width(model: ModelConfig) -> int:
    """Output width of the fused projection to queries, keys, values and, if the model has them, gates."""
    gate = query_width(model) if model.attention_output_gate else 0
    return query_width(model) + 2 * model.num_query_groups * model.kv_channels + gate


def normed_width(model: ModelConfig) -> int:
    """Width of all queries and keys that are normalised; 0 if the model does not normalise them."""
    return query_width(model) + model.num_query_groups * model.kv_channels if model.qk_layernorm else 0


def gated_width(model: ModelConfig) -> int:
    """Width of the activations that a gate adds to attention's output: its sigmoid, and the product of both."""
    return 2 * query_width(model) if model.attention_output_gate else 0


DISTANCE_CHANNELS = 8
"""Channels that ALiBi adds to a head (:mod:`gptpar.model.attention`): kernels take multiples of eight."""


def distance_width(model: ModelConfig) -> int:
    """Width of the activations that ALiBi adds: channels of queries, keys, values and output, and the output itself."""
    if model.position_embedding_type != "alibi":
        return 0
    heads = 2 * model.num_attention_heads + 2 * model.num_query_groups
    return DISTANCE_CHANNELS * heads + query_width(model)


def num_norms(model: ModelConfig) -> int:
    """Number of norms of hidden states in a block."""
    return 4 if model.norm_placement == "peri" else 2


def window_of(model: ModelConfig, layer: int) -> int | None:
    """How many tokens a layer's token sees, itself among them; ``None``: all earlier ones."""
    pattern = model.window_pattern or "S"
    if model.window_size is None or pattern[layer % len(pattern)] == "F":
        return None
    return model.window_size if model.window_size < model.seq_length else None


def _mean_seen(model: ModelConfig, layer: int) -> float:
    """Mean number of tokens that a layer's token sees: half a sample, or less with a window."""
    length, window = model.seq_length, window_of(model, layer)
    return length / 2 if window is None else window - window * window / (2 * length)


def fc1_width(model: ModelConfig) -> int:
    """Output width of the MLP's first matrix, which with SwiGLU computes gate and value."""
    return model.ffn_hidden_size * (2 if model.gated else 1)


def _layer_matmul_parameters(model: ModelConfig) -> int:
    attention = qkv_width(model) + query_width(model)
    return model.hidden_size * (attention + fc1_width(model) + model.ffn_hidden_size)


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that multiply every token: the layers' matrices and the LM head once, tied or not."""
    return model.num_layers * _layer_matmul_parameters(model) + model.hidden_size * model.padded_vocab_size


def flops_per_token(model: ModelConfig, *, causal: bool) -> float:
    """FLOPs of one token's forward and backward pass; recomputation is not counted.

    ``6 N + 12 L w s`` over the whole attention square, ``6 N + 6 L w s`` over its causal half, with N the
    matmul parameters, w the width of all heads and s the sequence length. The causal count times the tokens
    of an iteration equals Megatron-LM's ``num_floating_point_operations``. In a layer with a sliding window, the
    causal count covers what its tokens see, and the whole square is twice that.
    """
    seen = sum(_mean_seen(model, layer) for layer in range(model.num_layers))
    return 6.0 * matmul_parameters(model) + (12 if causal else 24) * query_width(model) * seen


def block_flops(model: ModelConfig, layer: int = 0) -> float:
    """FLOPs of a token's forward pass in one block: its matrix products and the causal half of attention."""
    return 2.0 * _layer_matmul_parameters(model) + 4.0 * query_width(model) * _mean_seen(model, layer)


def head_flops(model: ModelConfig) -> float:
    """FLOPs of a token's forward pass in the LM head."""
    return 2.0 * model.hidden_size * model.padded_vocab_size


def tflops_per_gpu(model: ModelConfig, tokens_per_s_per_gpu: float) -> float:
    """TFLOP/s per GPU as Megatron-LM's ``--log-throughput`` prints it (causal attention)."""
    return flops_per_token(model, causal=True) * tokens_per_s_per_gpu / 1e12


def mfu(tokens_per_s_per_gpu: float, flops_per_token: float, peak: float | None) -> float | None:
    """Model FLOPs utilisation as a fraction of ``peak`` FLOP/s; None where the peak is unknown."""
    return None if peak is None else tokens_per_s_per_gpu * flops_per_token / peak


# Dense TFLOP/s of one device at (bf16, fp16, tf32, fp32) from the makers' data sheets, half-precision
# products summed in fp32; None where the device lacks the type. A row applies when all its words are in the
# device's name, and the first such row counts, so variants stand before the plain name.
_PEAK_TFLOPS: tuple[tuple[str, tuple[float | None, float | None, float | None, float]], ...] = (
    ("b200", (2250, 2250, 1125, 75)),
    ("gh200", (989, 989, 494.5, 67)),
    ("h200 nvl", (835.5, 835.5, 417.5, 60)),
    ("h200", (989, 989, 494.5, 67)),
    ("h100 nvl", (835.5, 835.5, 417.5, 60)),
    ("h100 pcie", (756, 756, 378, 51)),
    ("h100", (989, 989, 494.5, 67)),
    ("h800 pcie", (756, 756, 378, 51)),
    ("h800", (989, 989, 494.5, 67)),
    ("h20", (148, 148, 74, 44)),
    ("a100", (312, 312, 156, 19.5)),
    ("a800", (312, 312, 156, 19.5)),
    ("a40", (149.7, 149.7, 74.8, 37.4)),
    ("a30", (165, 165, 82, 10.3)),
    ("a10", (125, 125, 62.5, 31.2)),
    ("a10g", (70, 70, 35, 35)),
    ("rtx a6000", (154.8, 154.8, 77.4, 38.7)),
    ("l40s", (362, 362, 183, 91.6)),
    ("l40", (181, 181, 90.5, 90.5)),
    ("l4", (121, 121, 60, 30.3)),
    ("rtx 6000 ada", (364.2, 364.2, 182.1, 91.1)),
    ("rtx 4090", (165.2, 165.2, 82.6, 82.6)),
    ("rtx 3090", (71, 71, 35.6, 35.6)),
    ("v100 pcie", (None, 112, None, 14)),
    ("v100", (None, 125, None, 15.7)),
    ("t4", (None, 65, None, 8.1)),
    ("mi300x", (1307.4, 1307.4, 653.7, 163.4)),
)
_COLUMN = {"bf16": 0, "fp16": 1, "tf32": 2, "fp32": 3}

# A MIG slice, a laptop chip or a sister card shares the name but not the speed.
_OTHER_VARIANTS = {"mig", "laptop", "max", "mobile", "d", "ti"}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Dense peak FLOP/s of the device that ``torch.cuda.get_device_name()`` names.

    ``precision`` is the matrix products' type, "bf16", "fp16", "fp32", or "tf32" for fp32 training with
    TF32 products allowed. None for any other type, and for a device that is not in the table (a CPU, say)
    or has no units for the type; MFU is then not reported.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if words & _OTHER_VARIANTS or precision not in _COLUMN:
        return None
    for row, peaks in _PEAK_TFLOPS:
        if words.issuperset(row.split()):
            peak = peaks[_COLUMN[precision]]
            return None if peak is None else peak * 1e12
    return None
