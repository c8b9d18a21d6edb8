"""Each of Megatron's arguments that changes the function of a model is understood or refused."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from gptpar.errors import CheckpointError
from gptpar.exchange.megatron.arguments import ABSENT_HERE, model_of
from tests.unit.exchange.megatron_models import GPT2, LLAMA, arguments

SAME: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 64,
    "ffn_hidden_size": 48,
    "num_attention_heads": 2,
    "kv_channels": 16,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-3,
    "apply_layernorm_1p": True,
    "qk_layernorm": True,
    "add_bias_linear": False,
    "swiglu": True,
    "hidden_dropout": 0.2,
    "attention_dropout": 0.2,
    "init_method_std": 0.5,
}
"""Arguments that set the field of their name."""
UNDERSTOOD: list[tuple[dict[str, Any], str, Any]] = [
    ({"group_query_attention": True, "num_query_groups": 2}, "num_query_groups", 2),
    ({"window_size": (3, 0)}, "window_size", 4),
    ({"window_size": (3, 0), "window_attn_skip_freq": 2}, "window_pattern", "SF"),
    ({"position_embedding_type": "rope", "no_rope_freq": 2}, "rope_pattern", "RN"),
    ({"use_rotary_position_embeddings": True}, "position_embedding_type", "rope"),
    ({"add_position_embedding": False}, "position_embedding_type", "none"),
    ({"normalization": "rmsnorm"}, "normalization", "RMSNorm"),
    ({"layernorm_zero_centered_gamma": True}, "apply_layernorm_1p", True),
    ({"add_bias_linear": False, "add_qkv_bias": True}, "add_qkv_bias", True),
    ({"squared_relu": True}, "mlp_activation", "squared_relu"),
    ({"glu_activation": "geglu"}, "mlp_activation", "geglu"),
    ({}, "mlp_activation", "gelu_tanh"),
    ({"bias_gelu_fusion": False}, "mlp_activation", "gelu"),
    ({"bias_gelu_fusion": False, "use_te_activation_func": True}, "mlp_activation", "gelu_tanh"),
    # Models of Megatron Core pass over --openai-gelu.
    ({"bias_gelu_fusion": False, "openai_gelu": True}, "mlp_activation", "gelu_tanh"),
    ({"bias_gelu_fusion": False, "openai_gelu": True, "use_mcore_models": False}, "mlp_activation", "gelu_tanh"),
    ({"bias_gelu_fusion": False, "openai_gelu": True, "use_legacy_models": True}, "mlp_activation", "gelu_tanh"),
    ({"bias_gelu_fusion": False, "openai_gelu": True, "use_mcore_models": True}, "mlp_activation", "gelu"),
    ({"bias_gelu_fusion": False, "openai_gelu": True, "use_legacy_models": False}, "mlp_activation", "gelu"),
    ({"bias_gelu_fusion": False, "openai_gelu": True, "deprecated_use_mcore_models": False}, "mlp_activation", "gelu"),
    ({"openai_gelu": True, "use_mcore_models": True}, "mlp_activation", "gelu_tanh"),
]
"""Arguments -> the field that they set, and its value."""
WRONG: dict[str, Any] = {
    "softmax_scale": 0.25,
    "window_size": (4, 3),
    "rotary_base": 10000.5,
    "position_embedding_type": "mrope",
    "activation_func_clamp_value": 0.0,
    "rotary_seq_len_interpolation_factor": 4,
    "window_attn_skip_freq": [1],
    "normalization": "SomeNorm",
}


def model(flags: str = GPT2, **given: Any) -> Any:
    found = arguments(flags)
    vars(found).update(given)
    return model_of(found, 64, Path("theirs"))


@pytest.mark.parametrize(
    ("given", "field", "value"), [*(({name: value}, name, value) for name, value in SAME.items()), *UNDERSTOOD]
)
def test_what_changes_the_function_is_understood(given: dict[str, Any], field: str, value: object) -> None:
    assert getattr(model(**given), field) == value


def test_megatron_turns_its_fused_gelu_off_without_biases() -> None:
    """So that says nothing of a gated MLP."""
    assert model(LLAMA, bias_gelu_fusion=False) == model(LLAMA, bias_gelu_fusion=True)


def test_what_gptpar_lacks_is_refused_by_name() -> None:
    values = itertools.cycle((2, object()))
    with pytest.raises(CheckpointError) as told:
        model(**dict(zip(ABSENT_HERE, values, strict=False)))
    sentences = str(told.value).splitlines()[1:]
    for name, sentence in zip(ABSENT_HERE, sentences, strict=False):
        assert sentence.startswith("it has ") and f"--{name.replace('_', '-')}" in sentence
    off = {"num_experts": [1], "softmax_type": "vanilla", "mtp_num_layers": 0, "softmax_scale": 8**-0.5}
    assert model(**dict.fromkeys(ABSENT_HERE)) == model(**off) == model()


@pytest.mark.parametrize("name", [*WRONG, "position_embedding_type of another class"])
def test_what_cannot_be_computed_is_refused(name: str) -> None:
    value = WRONG.get(name, object())
    name = name.split()[0]
    with pytest.raises(CheckpointError, match=f"gptpar cannot compute .*\n.*{name.replace('_', '[-_]')}"):
        model(**{name: value})
