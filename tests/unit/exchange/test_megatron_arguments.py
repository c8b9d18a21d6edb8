"""Each of Megatron's arguments that changes the function of a model is understood or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gptpar.errors import CheckpointError
from gptpar.exchange.megatron.arguments import ABSENT_HERE, model_of
from tests.unit.exchange.megatron_models import GPT2, LLAMA, arguments


def model(flags: str = GPT2, **given: Any) -> Any:
    found = arguments(flags)
    vars(found).update(given)
    return model_of(found, 64, Path("theirs"))


@pytest.mark.parametrize("name", ABSENT_HERE)
def test_what_gptpar_lacks_is_refused_by_name(name: str) -> None:
    for value in (2, 0.7, "a", [2], object()):
        with pytest.raises(CheckpointError, match=f"it has .*--{name.replace('_', '-')}"):
            model(**{name: value})
    model(**{name: None})


@pytest.mark.parametrize(
    "off", [{"num_experts": [1]}, {"softmax_type": "vanilla"}, {"mtp_num_layers": 0}, {"softmax_scale": 8**-0.5}]
)
def test_what_is_off_is_taken(off: dict[str, Any]) -> None:
    assert model(**off) == model()


WRONG = {
    "softmax_scale": 0.25,
    "window_size": (4, 3),
    "rotary_base": 10000.5,
    "swiglu": 2,
    "position_embedding_type": object(),
    "num_layers": 10**7,
    "activation_func_clamp_value": 0.0,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"gptpar cannot compute .*\n.*{name.replace('_', '[-_]')}"):
        model(**{name: WRONG[name]})


def test_whole_numbers_may_be_written_as_others() -> None:
    found = model(LLAMA, rotary_base=500000.0)
    assert found.rotary_base == 500000 and type(found.rotary_base) is int


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
