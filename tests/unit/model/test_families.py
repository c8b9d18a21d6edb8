"""Flags of Hugging Face's families: transformers' model and ours with the same weights give the same logits."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gptpar.config import ModelConfig, TokenizerConfig
from gptpar.config.sections.model import complete_model
from gptpar.errors import ConfigError
from gptpar.model.families import FAMILIES, flags_of
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
    "Llama": {**LLAMA, "model_type": "llama"},
    **{
        f"Llama with a gate of {name}": {**LLAMA, "model_type": "llama", "mlp_bias": name == "gelu"}
        | {"attention_bias": name == "gelu", "hidden_act": name}
        for name in ("gelu", "relu")
    },
    "Llama 3": {
        **LLAMA,
        "model_type": "llama",
        "rope_parameters": ROTARY_5,
        "tie_word_embeddings": True,
        "head_dim": 6,
    },
    "Llama 3.1 of short samples": {**LLAMA, "model_type": "llama", "rope_parameters": SHORT_31, "head_dim": 16},
    "Llama, YaRN with scales": {
        **LLAMA,
        "model_type": "llama",
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
        "no_rope_layers": [1, 0, 1, 0, 0],
        "use_sliding_window": True,
        "sliding_window": 5,
        "rope_parameters": YARN,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
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


def by_group(model: ModelConfig, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All queries, keys and values -> rows grouped as (queries, key, value)."""
    groups = [part.reshape(model.num_query_groups, -1, model.kv_channels, *part.shape[1:]) for part in (q, k, v)]
    return torch.cat(groups, dim=1).flatten(0, 2)


def of_gpt2(model: ModelConfig, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    names = {"wte": "embedding", "wpe": "positions", "ln_f": "final_norm"}
    inner = {"ln_1": "attention_norm", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out"}
    inner |= {"ln_2": "mlp_norm", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"}
    names |= {f"h.{i}.{old}": f"layers.{i}.{new}" for i in range(model.num_layers) for old, new in inner.items()}
    for old, new in names.items():
        for end in ("weight", "bias"):
            value = weights.get(f"transformer.{old}.{end}")
            if value is None:
                continue
            value = value.t() if ".c_" in old and end == "weight" else value  # it stores its matrices transposed
            yield f"{new}.{end}", by_group(model, *value.chunk(3)) if new.endswith("qkv") else value
    yield "output.weight", weights["lm_head.weight"]


def of_gpt_neox(model: ModelConfig, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    names = {"gpt_neox.embed_in": "embedding", "gpt_neox.final_layer_norm": "final_norm", "embed_out": "output"}
    names["lm_head"] = "output"
    inner = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    inner |= {"attention.query_key_value": "attention.qkv", "attention.dense": "attention.out"}
    inner |= {"mlp.dense_h_to_4h": "mlp.up", "mlp.dense_4h_to_h": "mlp.down"}
    for i in range(model.num_layers):
        names |= {f"gpt_neox.layers.{i}.{old}": f"layers.{i}.{new}" for old, new in inner.items()}
    for name, value in weights.items():
        layer, _, end = name.rpartition(".")
        yield f"{names[layer]}.{end}", value


def of_llama(model: ModelConfig, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Of those that are like it, too."""
    pairs = {"model.embed_tokens": "embedding", "model.norm": "final_norm", "lm_head": "output"}
    post = model.norm_placement == "post"
    inner = {
        "self_attn.o_proj": "attention.out",
        "self_attn.q_norm": "attention.query_norm",
        "self_attn.k_norm": "attention.key_norm",
        "mlp.down_proj": "mlp.down",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "attention_post_norm" if post else "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    }
    for i in range(model.num_layers):
        pairs |= {f"model.layers.{i}.{old}": f"layers.{i}.{new}" for old, new in inner.items()}
    for end in ("weight", "bias"):
        for old, new in pairs.items():
            if (value := weights.get(f"{old}.{end}")) is not None:
                yield f"{new}.{end}", value
        for i in range(model.num_layers):
            its = {name: weights.get(f"model.layers.{i}.{name}.{end}") for name in PROJECTIONS}
            q, k, v, gate, up = its.values()
            if q is not None and k is not None and v is not None:
                yield f"layers.{i}.attention.qkv.{end}", by_group(model, q, k, v)
            if gate is not None and up is not None:
                yield f"layers.{i}.mlp.up.{end}", torch.stack([gate, up])
    for i in range(model.num_layers):  # those with experts, whose halves lie one after the other
        prefix = f"model.layers.{i}.mlp"
        if (router := weights.get(f"{prefix}.gate.weight")) is not None:
            yield f"layers.{i}.mlp.router.weight", router
            yield f"layers.{i}.mlp.up", weights[f"{prefix}.experts.gate_up_proj"].unflatten(1, (2, -1))
            yield f"layers.{i}.mlp.down", weights[f"{prefix}.experts.down_proj"]


def of_gpt_oss(model: ModelConfig, weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Gates and values alternate; matrices are stored transposed."""
    yield from of_llama(model, weights)
    for i in range(model.num_layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        yield f"{ours}.attention.sinks", weights[f"{theirs}.self_attn.sinks"]
        for end in ("weight", "bias"):
            yield f"{ours}.mlp.router.{end}", weights[f"{theirs}.mlp.router.{end}"]
        up, down = (weights[f"{theirs}.mlp.experts.{name}_proj"] for name in ("gate_up", "down"))
        yield f"{ours}.mlp.up", torch.stack([up[..., ::2], up[..., 1::2]], 1).mT
        yield f"{ours}.mlp.down", down.mT
        bias = weights[f"{theirs}.mlp.experts.gate_up_proj_bias"]
        yield f"{ours}.mlp.up_bias", torch.stack([bias[:, ::2], bias[:, 1::2]], 1)
        yield f"{ours}.mlp.down_bias", weights[f"{theirs}.mlp.experts.down_proj_bias"]


PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
NAMES = {"gpt2": of_gpt2, "gpt_neox": of_gpt_neox} | dict.fromkeys(
    ("llama", "qwen2", "qwen3", "olmo2", "smollm3", "olmoe", "qwen3_moe", "mixtral"), of_llama
)
NAMES["gpt_oss"] = of_gpt_oss


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_theirs(name: str) -> None:
    reference = theirs(CASES[name])
    model = complete_model(flags_of(written_config(reference)), TokenizerConfig())
    stage = Stage(gpt_model(model).specs)
    weights = dict(NAMES[CASES[name]["model_type"]](model, reference.state_dict()))
    if model.tied:
        assert torch.equal(weights.pop("output.weight"), weights["embedding.weight"])
    assert weights.keys() == stage.global_parameters().keys()
    stage.place({name: value.contiguous() for name, value in weights.items()})
    tokens = random_tokens(3, 15, 61)
    with torch.no_grad():
        found, wanted = stage.eval()(tokens, {"seq_length": 16}), reference(tokens).logits.flatten(0, 1)
    assert wanted.abs().mean() > 0.1
    # transformers forms the angles of rotary positions in fp32.
    exact = model.position_embedding_type != "rope"
    torch.testing.assert_close(found, wanted, rtol=1e-11 if exact else 1e-5, atol=1e-11 if exact else 1e-5)


OF_KIND = {case["model_type"]: case for case in CASES.values() if "num_key_value_heads" in case}


@pytest.mark.parametrize("kind", OF_KIND)
def test_missing_key_value_heads_count_as_theirs(kind: str) -> None:
    fields = {**OF_KIND[kind], "num_attention_heads": 64, "hidden_size": 1024}
    del fields["num_key_value_heads"]
    config = transformers.AutoConfig.for_model(**fields)
    written = {name: value for name, value in config.to_dict().items() if name != "num_key_value_heads"}
    assert flags_of(written).num_query_groups == getattr(config, "num_key_value_heads", 64)
    assert flags_of(written | {"num_key_value_heads": None}).num_query_groups == 64  # where theirs takes it


SCALED = ("linear", "dynamic", "llama3", "yarn")


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("length", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_scaled_positions_give_their_logits_beyond_the_original_length(kind: str, length: int) -> None:
    rotary = {"linear": LINEAR, "dynamic": DYNAMIC, "llama3": SHORT_31, "yarn": YARN}[kind]
    fields = {**LLAMA, "model_type": "llama", "head_dim": 16, "rope_parameters": rotary}
    if kind != "dynamic":  # its field is the original length
        fields["max_position_embeddings"] = length
    reference = theirs(fields)
    flags = dataclasses.replace(flags_of(written_config(reference)), seq_length=length)
    model = complete_model(flags, TokenizerConfig())
    assert model.rope_scaling_type == kind
    stage = Stage(gpt_model(model).specs)
    stage.place({name: value.contiguous() for name, value in of_llama(model, reference.state_dict())})
    tokens = random_tokens(2, length - 1, 61)
    with torch.no_grad():
        found, wanted = stage.eval()(tokens, {"seq_length": length}), reference(tokens).logits.flatten(0, 1)
        plain = dataclasses.replace(model, rope_scaling_type=None)
        stage_of_plain = Stage(gpt_model(plain).specs)
        stage_of_plain.place({name: value.contiguous() for name, value in of_llama(plain, reference.state_dict())})
        unscaled = stage_of_plain.eval()(tokens, {"seq_length": length})
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
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
        ({**LLAMA, "model_type": "llama", "attention_bias": True}, "mlp_bias is False, and gptpar computes with True"),
        ({**LLAMA, "model_type": "llama", "rope_scaling": {"type": "longrope"}}, "rope_type is 'longrope', and gptpar"),
        *(
            (
                {**LLAMA, "model_type": kind, "rope_parameters": {**ROTARY_5, "partial_rotary_factor": 0.5}},
                f"^(?s:.*){kind}: partial_rotary_factor is 0.5; transformers' models of this family ignore it and turn",
            )
            for kind in ("llama", "smollm3")
        ),
        (
            {**LLAMA, "model_type": "llama", "num_attention_heads": 0, "rms_norm_eps": "1e-5", "attention_bias": 1},
            "(?s)attention_bias is 1; true or false is needed..*num_attention_heads is 0; a whole number from 1 is "
            'needed..*rms_norm_eps is "1e-5"; a number is needed.',
        ),
        (
            {**LLAMA, "model_type": "llama", "rms_norm_eps": 0, "head_dim": 0, "vocab_size": 2**62}
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
