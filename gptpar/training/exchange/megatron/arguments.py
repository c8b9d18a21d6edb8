"""The model and the run that Megatron's arguments describe."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from gptpar.config import Flags, ModelConfig, ModelFlags, TokenizerConfig
from gptpar.config.checks.model import check_model
from gptpar.config.complete import complete_model
from gptpar.errors import CheckpointError, ConfigError, printable
from gptpar.training.exchange.hf_folder import MAX_LAYERS

ABSENT_HERE = {
    "num_experts": "mixture of experts",
    "multi_latent_attention": "multi-latent attention",
    "apply_layernorm_1p": "norms whose weights are stored less one",
    "apply_residual_connection_post_layernorm": "a residual taken after the norm",
    "rotary_interleaved": "interleaved rotary pairs",
    "use_rope_scaling": "scaled rotary positions",
    "qk_clip": "clipped attention logits",
    "mtp_num_layers": "multi-token prediction",
}
"""Arguments of Megatron that must be off."""

PLAIN = (bool, int, float, str)
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "LayerNorm": "LayerNorm", "RMSNorm": "RMSNorm"}


def model_of(arguments: Namespace, rows: int, path: Path) -> ModelConfig:
    """The model that Megatron's arguments describe.

    Args:
        rows: of the vocabulary.

    Raises:
        CheckpointError: with all reasons why gptpar cannot compute the same.
    """
    given = vars(arguments)
    problems = [
        f"it has {what} (--{name.replace('_', '-')})" for name, what in ABSENT_HERE.items() if _is_on(given, name)
    ]
    values = _values(given) | {"padded_vocab_size": rows}
    layers = values.get("num_layers")
    if type(layers) is not int or not 1 <= layers <= MAX_LAYERS:
        problems.append(f"it has {printable(str(layers)[:80])} layers; there can be 1 to {MAX_LAYERS:,}")
        values["num_layers"] = 1
    try:
        flags = ModelFlags(**values)
        problems += check_model(Flags(model=flags))
        if not problems:
            return complete_model(flags, TokenizerConfig())
    except (TypeError, ValueError, ArithmeticError, AttributeError, ConfigError) as error:
        problems.append(f"its arguments are not those of a GPT: {printable(str(error)[:200])}")
    raise CheckpointError(f"gptpar cannot compute what the model in {path} does:\n" + "\n".join(problems))


def _is_on(given: Mapping[str, Any], name: str) -> bool:
    """Megatron-DeepSpeed's default of ``--num-experts`` is a list of one expert, which is none."""
    return bool(given.get(name)) and given[name] != [1]


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments as fields of our flags: most have one name."""
    known = {spec.name for spec in fields(ModelFlags)} - {"preset", "make_vocab_size_divisible_by", "window_pattern"}
    values: dict[str, Any] = {
        name: value for name, value in given.items() if name in known and isinstance(value, PLAIN)
    }
    values["normalization"] = NORMS.get(str(given.get("normalization")), "LayerNorm")
    values.setdefault("norm_epsilon", given.get("layernorm_epsilon", 1e-5))
    if given.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    tanh = given.get("bias_gelu_fusion") or given.get("openai_gelu")
    values["mlp_activation"] = "squared_relu" if given.get("squared_relu") else "gelu_tanh" if tanh else "gelu"
    if not given.get("group_query_attention"):
        values["num_query_groups"] = given.get("num_key_value_heads") or given.get("num_attention_heads")
    window = given.get("window_size")
    if isinstance(window, list | tuple) and window and window[0] >= 0:  # tokens before the token itself
        values["window_size"] = window[0] + 1
    return values


def count_in(values: Mapping[str, Any], name: str) -> int | None:
    """A whole number that a stranger's checkpoint gives, if it is one."""
    value = values.get(name)
    return value if type(value) is int and value >= 0 else None
