"""Flags of Hugging Face's families: transformers' model and ours with the same weights give the same logits."""

import dataclasses
from collections.abc import ItemsView
from functools import partial
from typing import Any

import pytest
import torch

from gptpar.config import ModelConfig, TokenizerConfig
from gptpar.config.sections.model import complete_model
from gptpar.errors import ConfigError
from gptpar.model.families import FAMILIES, flags_of, tensors_of
from gptpar.model.gpt import gpt_model
from gptpar.pipeline import Stage
from tests.helpers import random_tokens

transformers = pytest.importorskip("transformers")

VOCAB_SIZE = 61
LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
LLAMA3 = {**LLAMA, "model_type": "llama"}
NEOX = {**LLAMA, "model_type": "gpt_neox"}
ROTARY_5 = {"rope_theta": 500.0, "rope_type": "default"}
ROTARY_31 = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {**ROTARY_5, "rope_type": "linear", "factor": 4.0}
DYNAMIC = {**ROTARY_5, "rope_type": "dynamic", "factor": 4.0}
SHORT_31 = {**ROTARY_31, "original_max_position_embeddings": 8, "low_freq_factor": 0.5, "high_freq_factor": 3.0}
YARN = {**ROTARY_5, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "beta_fast": 2.0}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_positions": 16, "n_embd": 32, "n_layer": 3, "n_head": 4}
QWEN2 = {**LLAMA, "model_type": "qwen2"}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
OLMOE = {**LLAMA, "model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None}
QWEN3_MOE = {**LLAMA, "model_type": "qwen3_moe", "moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 16}
GPT_OSS: dict[str, Any] = {
    **LLAMA,
    **{"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 5},
    **{"rope_parameters": {**YARN, "truncate": False}, "swiglu_limit": 0.5},
}
SMOLLM3 = {**LLAMA, "model_type": "smollm3", "pad_token_id": 0}
CASES: dict[str, dict[str, Any]] = {
    "GPT-2": GPT2,
    "GPT-2, other sizes": {**GPT2, "n_inner": 40, "layer_norm_epsilon": 1e-3, "activation_function": "gelu"},
    "GPT-NeoX": NEOX,
    "GPT-NeoX, one after the other": {**NEOX, "use_parallel_residual": False, "hidden_act": "gelu_new"},
    "Llama": LLAMA3,
    "Llama with a gate of gelu": {**LLAMA3, "hidden_act": "gelu", "mlp_bias": True, "attention_bias": True},
    "Llama with a gate of relu": {**LLAMA3, "hidden_act": "relu"},
    "Llama 3": {**LLAMA3, "rope_parameters": ROTARY_5, "tie_word_embeddings": True, "head_dim": 6},
    "Llama 3.1 of short samples": {**LLAMA3, "rope_parameters": SHORT_31, "head_dim": 16},
    "Llama, YaRN with scales": {
        **LLAMA3,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    },
    "GPT-NeoX, YaRN": {
        **NEOX,
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.5, "attention_factor": 1.5, "beta_slow": 0.25},
    },
    "Qwen2": QWEN2,
    "Qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16, "rms_norm_eps": 1e-2},
    "Qwen3, YaRN and windows": {**LLAMA, "model_type": "qwen3", "head_dim": 16, "rope_parameters": YARN, **WINDOWS},
    "OLMo-2": {**LLAMA, "model_type": "olmo2"},
    "SmolLM3": {**SMOLLM3, "num_hidden_layers": 5},
    "SmolLM3, windows": {
        **SMOLLM3,
        **{"no_rope_layers": [1, 0, 1, 0, 0], "use_sliding_window": True, "sliding_window": 5, "rope_parameters": YARN},
        **{"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    },
    "OLMoE": OLMOE,
    "Qwen3-MoE": {**QWEN3_MOE, "num_experts": 5, "norm_topk_prob": True},
    "Qwen3-MoE, some blocks and windows": {
        **QWEN3_MOE,
        **{"decoder_sparse_step": 2, "num_hidden_layers": 5, "mlp_only_layers": [3], "intermediate_size": 40},
        **{"use_sliding_window": True, "sliding_window": 5, "rope_parameters": YARN, "tie_word_embeddings": True},
    },
    "Mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt-oss": GPT_OSS,
    "gpt-oss, other layers": {
        **GPT_OSS,
        **{"layer_types": ["full_attention", "sliding_attention", "full_attention"], "num_experts_per_tok": 3},
        **{"rope_parameters": LINEAR, "tie_word_embeddings": True, "num_key_value_heads": 4},
    },
}


def test_each_family_has_a_case() -> None:
    assert {case["model_type"] for case in CASES.values()} == FAMILIES.keys()


def theirs(fields: dict[str, Any]) -> Any:
    """Their model in fp64, with weights in which mistakes show."""
    kind = fields["model_type"]
    config = transformers.AutoConfig.for_model(**fields)
    config._attn_implementation = config._experts_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval().double()
    assert config.model_type == kind
    for number, parameter in enumerate(model.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        parameter.data = (parameter.data if parameter.dim() == 1 else 0) + noise * 0.2
    return model


def written_config(model: Any) -> dict[str, Any]:
    """What transformers would write to ``config.json``."""
    found: dict[str, Any] = model.config.to_dict()
    return found


def of_theirs(kind: str, model: ModelConfig, weights: dict[str, torch.Tensor]) -> ItemsView[str, torch.Tensor]:
    """Our parameters with transformers' weights, which have the names of its files but for those of experts."""
    wide = next(iter(weights.values())).dtype
    if "lm_head.weight" in weights:
        weights = {"embed_out.weight": weights["lm_head.weight"], **weights}  # GPT-NeoX's own name
    parameters = Stage(gpt_model(model).specs).global_parameters()
    found = {name: torch.full(one.shape, torch.nan, dtype=wide) for name, one in parameters.items()}
    for tensor in tensors_of(kind, model, VOCAB_SIZE):
        if tensor.name in weights:
            view = tensor.view(found[tensor.ours])
            view.copy_(weights[tensor.name].reshape(view.shape))
    for i in range(model.num_layers):
        prefix = f"model.layers.{i}.mlp"
        if kind != "gpt_oss" and f"{prefix}.gate.weight" in weights:  # in memory all experts are one tensor
            found[f"layers.{i}.mlp.router.weight"] = weights[f"{prefix}.gate.weight"]
            found[f"layers.{i}.mlp.up"] = weights[f"{prefix}.experts.gate_up_proj"].unflatten(1, (2, -1))
            found[f"layers.{i}.mlp.down"] = weights[f"{prefix}.experts.down_proj"]
    assert not any(value.isnan().any() for value in found.values())
    return found.items()


NAMES = {kind: partial(of_theirs, kind) for kind in FAMILIES}
"""Of each family: our parameters' names and values, from a model's configuration and transformers' weights."""


def our_logits(model: ModelConfig, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    stage = Stage(gpt_model(model).specs).eval()
    stage.place({name: value.contiguous() for name, value in weights.items()})
    with torch.no_grad():
        return stage(tokens, {"seq_length": tokens.shape[1]})


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_theirs(name: str) -> None:
    reference = theirs(CASES[name])
    model = complete_model(flags_of(written_config(reference)), TokenizerConfig())
    weights = dict(NAMES[CASES[name]["model_type"]](model, reference.state_dict()))
    tokens = random_tokens(3, 15, 61)
    with torch.no_grad():
        wanted = reference(tokens).logits.flatten(0, 1)
    assert wanted.abs().mean() > 0.1
    # transformers forms the angles of rotary positions in fp32.
    tolerance = 1e-11 if model.position_embedding_type != "rope" else 1e-5
    torch.testing.assert_close(our_logits(model, weights, tokens), wanted, rtol=tolerance, atol=tolerance)


OF_KIND = {case["model_type"]: case for case in CASES.values() if "num_key_value_heads" in case}


@pytest.mark.parametrize("kind", OF_KIND)
def test_missing_key_value_heads_count_as_theirs(kind: str) -> None:
    fields = {**OF_KIND[kind], "num_attention_heads": 64, "hidden_size": 1024}
    del fields["num_key_value_heads"]
    config = transformers.AutoConfig.for_model(**fields)
    written = {name: value for name, value in config.to_dict().items() if name != "num_key_value_heads"}
    assert flags_of(written).num_query_groups == getattr(config, "num_key_value_heads", 64)
    assert flags_of(written | {"num_key_value_heads": None}).num_query_groups == 64  # where theirs takes it


SCALED = {"linear": LINEAR, "dynamic": DYNAMIC, "llama3": SHORT_31, "yarn": YARN}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_positions_give_their_logits_beyond_the_original_length(kind: str) -> None:
    length, fields = 40, {**LLAMA3, "head_dim": 16, "rope_parameters": SCALED[kind]}
    if kind != "dynamic":  # its field is the original length
        fields["max_position_embeddings"] = length
    reference = theirs(fields)
    flags = dataclasses.replace(flags_of(written_config(reference)), seq_length=length)
    model = complete_model(flags, TokenizerConfig())
    assert model.rope_scaling_type == kind
    weights, tokens = dict(NAMES["llama"](model, reference.state_dict())), random_tokens(2, length - 1, 61)
    with torch.no_grad():
        wanted = reference(tokens).logits.flatten(0, 1)
    found = our_logits(model, weights, tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    unscaled = our_logits(dataclasses.replace(model, rope_scaling_type=None), weights, tokens)
    assert (found - unscaled).abs().max() > 1e-2


@pytest.mark.parametrize(
    "name",
    [
        *("GPT-NeoX, YaRN", "Llama 3", "Llama 3.1 of short samples", "Qwen3, YaRN and windows", "SmolLM3, windows"),
        *("Qwen3-MoE, some blocks and windows", "gpt-oss"),
    ],
)
def test_a_config_of_the_version_before_gives_the_same_flags(name: str) -> None:
    """Version 4 wrote a field for each number of the rotary positions, and kinds of layers for gpt-oss alone."""
    new = written_config(theirs(CASES[name]))
    unknown = ("rope_parameters", *(["layer_types"] if new["model_type"] != "gpt_oss" else []))
    old = {key: value for key, value in new.items() if key not in unknown}
    rotary = new.get("rope_parameters") or {}
    if "rope_theta" in rotary:
        old["rotary_emb_base" if new["model_type"] == "gpt_neox" else "rope_theta"] = rotary["rope_theta"]
    if "partial_rotary_factor" in rotary:
        old["rotary_pct"] = rotary["partial_rotary_factor"]
    if rotary.get("rope_type", "default") != "default":
        old["rope_scaling"] = {name: value for name, value in rotary.items() if name != "rope_theta"}
    assert flags_of(old) == flags_of(new)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not known; gptpar knows gpt2, "),
        ({"model_type": "deepseek_v2"}, "gptpar lacks attention over latent keys and values .*; gptpar knows"),
        ({**OLMOE, "clip_qkv": 8.0}, "clip_qkv is 8, and gptpar clips neither queries nor keys nor values."),
        ({**LLAMA, "model_type": "mixtral"}, "num_experts_per_tok is missing in the config.json: a mixtral model"),
        ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({**LLAMA3, "attention_bias": True}, "mlp_bias is False, and gptpar computes with True"),
        ({**LLAMA3, "rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope', and gptpar"),
        *(
            (
                {**LLAMA, "model_type": kind, "rope_parameters": {**ROTARY_5, "partial_rotary_factor": 0.5}},
                f"^(?s:.*){kind}: partial_rotary_factor is 0.5; transformers' models of this family ignore it and turn",
            )
            for kind in ("llama", "smollm3")
        ),
        (
            {**LLAMA3, "num_attention_heads": 0, "rms_norm_eps": "1e-5", "attention_bias": 1},
            "(?s)attention_bias is 1; true or false is needed..*num_attention_heads is 0; a whole number from 1 is "
            'needed..*rms_norm_eps is "1e-5"; a number is needed.',
        ),
        (
            {**LLAMA3, "rms_norm_eps": 0, "head_dim": 0, "vocab_size": 2**62}
            | {"num_key_value_heads": -2, "rope_parameters": {**ROTARY_31, "factor": 0, "rope_theta": float("inf")}},
            "(?s)llama: rope_theta is Infinity; a finite number is needed..*factor of the rotary positions is 0; a "
            "number from 1 .*num_key_value_heads is -2; .*head_dim is 0; .*vocab_size is 4611686018427387904; a whole "
            "number from 1 to 2,147,483,647 is needed..*rms_norm_eps is 0; a number above 0 is needed.",
        ),
        ({**GPT_OSS, "rope_parameters": None}, "gpt_oss: rope_parameters is missing, and transformers would"),
        ({**GPT_OSS, "layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ({**NEOX, "quantization_config": {"quant_method": "gptq"}}, "quantization_config is set, and gptpar has no"),
    ],
)
def test_what_cannot_be_reproduced_is_told(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        flags_of(fields)
