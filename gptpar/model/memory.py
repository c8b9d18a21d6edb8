"""Counts the bytes of activations that a transformer layer keeps for its backward pass.

Sources: the activation formulas of arXiv 2205.05198 (Korthikanti et al.) and Megatron-LM's theoretical_memory_usage.py,
generalised to grouped queries, SwiGLU and wider activations. Attention is assumed to run in a fused kernel (torch's
scaled_dot_product_attention), which stores no s x s matrix.
"""

from __future__ import annotations

from gptpar.config import ModelConfig
from gptpar.model.flops import distance_width, gated_width, normed_width, num_norms, qkv_width, query_width


def layer_activation_bytes_per_token(
    model: ModelConfig,
    bytes_per_element: int,
    *,
    has_dropout: bool = False,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Bytes that one layer keeps for the backward pass, for each token of the micro-batch.

    With h hidden, 16-bit elements, dropout and a GELU MLP of 4h this is ``h (10 + 24 / t)``, or ``34 h / t``
    with sequence parallelism.

    Args:
        bytes_per_element: of activations: 2 for bf16 and fp16, 4 for fp32, 8 for fp64.
        has_dropout: whether masks of the hidden states are kept.
        tensor_parallel: number of tensor ranks.
        sequence_parallel: whether these ranks divide the tokens between layers.
    """
    size, h = bytes_per_element, model.hidden_size
    # Inputs of the norms, of qkv and of fc1. With parallel residuals, the norms of attention and MLP have one input.
    inputs = num_norms(model) + 2 - model.use_parallel_residual
    replicated = inputs * h * size + (2 * h if has_dropout else 0)
    mlp = model.ffn_hidden_size * (3 if model.gated else 2)
    # A norm of queries and keys keeps its input, attention its output.
    split = (
        qkv_width(model) + normed_width(model) + query_width(model) + gated_width(model) + distance_width(model) + mlp
    ) * size
    replicas = tensor_parallel if sequence_parallel else 1
    return replicated / replicas + split / tensor_parallel
