from dataclasses import asdict, replace

import pytest
from torch import nn

from gptpar.config import ModelConfig
from gptpar.model.gpt import gpt_model
from gptpar.model.spec import ModelSpec
from gptpar.plan.hardware import mfu, peak_flops
from tests.unit.model.gpt_shape import GPTShape

GPT2_124M = GPTShape()
LLAMA3_8B = GPTShape(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    seq_length=8192,
    padded_vocab_size=128256,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


def reference_model(s: GPTShape) -> nn.ModuleDict:
    """The same GPT out of torch's own modules, on the meta device."""

    def norm(width: int = s.hidden_size) -> nn.Module:
        return (nn.RMSNorm if s.normalization == "RMSNorm" else nn.LayerNorm)(width, device="meta")

    def linear(inputs: int, outputs: int, bias: bool) -> nn.Module:
        return nn.Linear(inputs, outputs, bias=bias, device="meta")

    query, keys = s.num_attention_heads * s.kv_channels, s.num_query_groups * s.kv_channels
    layers = [
        nn.ModuleDict(
            {
                "norm1": norm(),
                "q": linear(s.hidden_size, query, s.add_bias_linear or s.add_qkv_bias),
                "kv": linear(s.hidden_size, 2 * keys, s.add_bias_linear or s.add_qkv_bias),
                "proj": linear(query, s.hidden_size, s.add_bias_linear),
                "norm2": norm(),
                "heads": nn.ModuleList(norm(s.kv_channels) for _ in range(2 if s.qk_layernorm else 0)),
                "fc1": linear(s.hidden_size, s.ffn_hidden_size * (2 if s.swiglu else 1), s.add_bias_linear),
                "fc2": linear(s.ffn_hidden_size, s.hidden_size, s.add_bias_linear),
            }
        )
        for _ in range(s.num_layers)
    ]
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": norm()})
    model["words"] = nn.Embedding(s.padded_vocab_size, s.hidden_size, device="meta")
    if s.position_embedding_type == "learned_absolute":
        model["positions"] = nn.Embedding(s.max_position_embeddings, s.hidden_size, device="meta")
    if s.untie_embeddings_and_output_weights:
        model["head"] = linear(s.hidden_size, s.padded_vocab_size, bias=False)
    return model


SHAPES = [
    GPT2_124M,
    LLAMA3_8B,
    replace(GPT2_124M, num_query_groups=3, kv_channels=48),
    replace(GPT2_124M, add_bias_linear=False, add_qkv_bias=True, swiglu=True),
    replace(GPT2_124M, qk_layernorm=True, num_query_groups=3),
    replace(GPT2_124M, position_embedding_type="none", untie_embeddings_and_output_weights=True),
]


def described(shape: GPTShape) -> ModelSpec:
    return gpt_model(ModelConfig(**asdict(shape)))


@pytest.mark.parametrize("shape", SHAPES)
def test_parameter_count_is_that_of_torch_modules(shape):
    assert described(shape).num_parameters == sum(p.numel() for p in reference_model(shape).parameters())


def test_known_parameter_counts():
    assert described(replace(GPT2_124M, padded_vocab_size=50257)).num_parameters == 124_439_808  # GPT-2 as published
    assert described(GPT2_124M).num_parameters == 124_475_904
    assert described(LLAMA3_8B).num_parameters == 8_030_261_248  # Llama 3 8B as published


@pytest.mark.parametrize("shape", SHAPES)
def test_flops_are_those_of_the_linear_weights_and_one_head(shape):
    linears = [m for m in reference_model(shape)["layers"].modules() if isinstance(m, nn.Linear)]
    matrices = sum(m.weight.numel() for m in linears) + shape.padded_vocab_size * shape.hidden_size
    attention = shape.num_layers * shape.num_attention_heads * shape.kv_channels * shape.seq_length
    assert described(shape).flops_per_token(causal=True) == 6 * matrices + 6 * attention
    assert described(shape).flops_per_token(causal=False) == 6 * matrices + 12 * attention


def test_llama3_8b_matches_both_published_conventions():
    assert 13_812 * described(LLAMA3_8B).flops_per_token(causal=False) / 1e12 == pytest.approx(800, abs=1)
    assert 14_451 * described(LLAMA3_8B).flops_per_token(causal=True) / 1e12 == pytest.approx(744, abs=1)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H200", "tf32", 494.5),
        ("NVIDIA A10G", "bf16", 70),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
    ],
)
def test_peak_of_known_devices(name, precision, tflops):
    assert peak_flops(name, precision) == tflops * 1e12


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("cpu", "bf16"),
        ("Tesla V100-SXM2-16GB", "bf16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
    ],
)
def test_unknown_peak_means_no_mfu(name, precision):
    assert peak_flops(name, precision) is None
    assert mfu(1000.0, 1e9, None) is None
