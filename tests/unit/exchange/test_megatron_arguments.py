"""Each of Megatron's arguments that changes the function of a model is understood or refused."""

from pathlib import Path
from typing import Any

import pytest

from gptpar.errors import CheckpointError
from gptpar.exchange.megatron.arguments import ABSENT_HERE, model_of
from tests.unit.exchange.megatron_models import GPT2, LLAMA, arguments

# Field -> arguments of a run that set it to something else than the model of the test has.
UNDERSTOOD: dict[str, dict[str, Any]] = {
    "num_layers": {"num_layers": 6},
    "hidden_size": {"hidden_size": 64},
    "ffn_hidden_size": {"ffn_hidden_size": 48},
    "num_attention_heads": {"num_attention_heads": 2},
    "num_query_groups": {"group_query_attention": True, "num_query_groups": 2},
    "kv_channels": {"kv_channels": 16},
    "window_size": {"window_size": (3, 0)},
    "window_attn_skip_freq": {"window_size": (3, 0), "window_attn_skip_freq": 2},
    "no_rope_freq": {"position_embedding_type": "rope", "no_rope_freq": 2},
    "normalization": {"normalization": "RMSNorm"},
    "layernorm_epsilon": {"norm_epsilon": 1e-3},
    "layernorm_zero_centered_gamma": {"apply_layernorm_1p": True},
    "qk_layernorm": {"qk_layernorm": True},
    "add_bias_linear": {"add_bias_linear": False},
    "add_qkv_bias": {"add_bias_linear": False, "add_qkv_bias": True},
    "gated_linear_unit": {"swiglu": True},
    "activation_func": {"squared_relu": True},
    "bias_activation_fusion": {"bias_gelu_fusion": False},
    "use_te_activation_func": {"bias_gelu_fusion": False, "use_te_activation_func": True},
    "hidden_dropout": {"hidden_dropout": 0.2},
    "attention_dropout": {"attention_dropout": 0.2},
    "init_method_std": {"init_method_std": 0.5},
}
# Field -> arguments that are refused: gptpar does not compute what Megatron does with them, or no model can have them.
REFUSED: dict[str, dict[str, Any]] = {
    **{name: {name: 2} for name in ABSENT_HERE},
    "softmax_scale": {"softmax_scale": 0.25},
    "mrope_section": {"position_embedding_type": "mrope"},
}
WRONG = {
    "window_size": (4, 3),
    "rotary_base": 10000.5,
    "position_embedding_type": object(),
    "activation_func_clamp_value": 0.0,
    "rotary_seq_len_interpolation_factor": 4,
    "window_attn_skip_freq": [1],
    "normalization": "SomeNorm",
}


def model(flags: str = GPT2, **given: Any) -> Any:
    found = arguments(flags)
    vars(found).update(given)
    return model_of(found, 64, Path("theirs"))


def test_an_understood_field_changes_the_model() -> None:
    for name, given in UNDERSTOOD.items():
        but_the_last = dict(list(given.items())[:-1])
        assert model(**given) != model(**but_the_last), name


@pytest.mark.slow
def test_what_gptpar_lacks_is_refused_by_name() -> None:
    for name in ABSENT_HERE:
        with pytest.raises(CheckpointError, match=f"it has .*--{name.replace('_', '-')}"):
            model(**{name: object()})
        model(**{name: None})
    for off in ({"num_experts": [1]}, {"softmax_type": "vanilla"}, {"mtp_num_layers": 0}, {"softmax_scale": 8**-0.5}):
        assert model(**off) == model()


@pytest.mark.parametrize("given", [*REFUSED.values(), *({name: value} for name, value in WRONG.items())], ids="".join)
def test_what_cannot_be_computed_is_refused(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(CheckpointError, match=f"gptpar cannot compute .*\n.*{name.replace('_', '[-_]')}"):
        model(**given)


def test_megatron_turns_its_fused_gelu_off_without_biases() -> None:
    """So that says nothing of a gated MLP, and exact GELU of another."""
    assert model(LLAMA, bias_gelu_fusion=False) == model(LLAMA, bias_gelu_fusion=True)
    assert model(bias_gelu_fusion=False).mlp_activation == "gelu"
    assert model(bias_gelu_fusion=False, use_te_activation_func=True).mlp_activation == "gelu_tanh"
    assert model(squared_relu=True).mlp_activation == "squared_relu"
    assert model(glu_activation="geglu").mlp_activation == "geglu"


def test_norms_and_positions_by_their_other_names() -> None:
    assert model(layernorm_zero_centered_gamma=True).apply_layernorm_1p
    assert model(add_position_embedding=False).position_embedding_type == "none"
    assert model(use_rotary_position_embeddings=True).position_embedding_type == "rope"
    assert model(normalization="rmsnorm").normalization == "RMSNorm"


@pytest.mark.parametrize(
    ("implementation", "form"),
    [
        ({}, "gelu_tanh"),
        ({"use_mcore_models": False}, "gelu_tanh"),
        ({"use_legacy_models": True}, "gelu_tanh"),
        ({"use_mcore_models": True}, "gelu"),
        ({"use_legacy_models": False}, "gelu"),
        ({"deprecated_use_mcore_models": False}, "gelu"),
    ],
)
def test_models_of_megatron_core_pass_over_openai_gelu(implementation: dict[str, bool], form: str) -> None:
    assert model(openai_gelu=True, bias_gelu_fusion=False, **implementation).mlp_activation == form
    assert model(openai_gelu=True, **implementation).mlp_activation == "gelu_tanh"
