"""Makes a model's configuration from Megatron's arguments, and refuses those that gptpar lacks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from gptpar.config import Flags, ModelConfig, ModelFlags, TokenizerConfig
from gptpar.config.checks.model import check_model
from gptpar.config.complete import complete_model
from gptpar.config.ranges import range_problems
from gptpar.errors import CheckpointError, ConfigError, printable
from gptpar.training.exchange.hf_folder import MAX_LAYERS

ABSENT_HERE = {
    "num_experts": "mixture of experts",
    "multi_latent_attention": "multi-latent attention",
    "apply_residual_connection_post_layernorm": "a residual taken after the norm",
    "rotary_interleaved": "interleaved rotary pairs",
    "qk_clip": "clipped attention logits",
    "mtp_num_layers": "multi-token prediction",
    "no_rope_freq": "layers without rotary positions",
    "qk_l2_norm": "queries and keys of length 1",
    "window_attn_skip_freq": "sliding windows in some layers alone",
}
"""Arguments of Megatron that must be off, and what each turns on."""

NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "seq_length")
"""Arguments without which no model can be built; Megatron always has them."""

PLAIN = (bool, int, float, str)
OF_THIS_RUN = {"preset", "make_vocab_size_divisible_by", "pad_vocab_size_to", "window_pattern"}
"""Fields of the flags that Megatron's arguments of the same name do not set."""
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "LayerNorm": "LayerNorm", "RMSNorm": "RMSNorm"}


def model_of(arguments: Namespace, rows: int, path: Path) -> ModelConfig:
    """The model that Megatron's arguments describe.

    Args:
        rows: rows of the word embedding, padding included.

    Raises:
        CheckpointError: with all reasons why gptpar cannot compute the same model.
    """
    given = vars(arguments)
    problems = list(_absent(given))
    values = _values(given) | {"padded_vocab_size": rows}
    layers = values.get("num_layers")
    if type(layers) is not int or not 1 <= layers <= MAX_LAYERS:
        problems.append(f"it has {printable(str(layers)[:80])} layers; there can be 1 to {MAX_LAYERS:,}")
        values["num_layers"] = 1
    problems += _unknown_words(values)
    problems += _uneven(given)
    problems += [] if problems else _lacking(given)
    try:
        flags = Flags(model=ModelFlags(**values))
        problems += [*range_problems(flags), *check_model(flags)]
        if not problems:
            return complete_model(flags.model, TokenizerConfig())
    except (TypeError, ValueError, ArithmeticError, AttributeError, ConfigError) as error:
        problems.append(f"its arguments are not those of a GPT: {printable(str(error)[:200])}")
    raise CheckpointError(f"gptpar cannot compute what the model in {path} does:\n" + "\n".join(problems))


def _absent(given: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each feature of Megatron's model that gptpar does not have."""
    on = {name: what for name, what in ABSENT_HERE.items() if _is_on(given, name)}
    yield from (f"it has {what} (--{name.replace('_', '-')})" for name, what in on.items())
    if given.get("rotary_seq_len_interpolation_factor") not in (None, 1):
        yield "it has stretched rotary positions (--rotary-seq-len-interpolation-factor)"
    if given.get("softmax_type") not in (None, "vanilla"):
        yield "it has another softmax (--softmax-type)"
    window = given.get("window_size")
    if isinstance(window, list | tuple) and len(window) > 1 and window[1] not in (0, -1):
        yield "its attention windows reach tokens that come later (--window-size)"


def _lacking(given: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for the arguments that are not there."""
    if names := [name for name in NEEDED if given.get(name) is None]:
        yield f"its arguments do not say {', '.join(names)}: add them to its 'args'"


def _uneven(given: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each number that must divide another one and does not."""
    for name, by in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_query_groups")):
        whole, count = given.get(name), given.get(by)
        used = given.get("kv_channels") is None if name == "hidden_size" else bool(given.get("group_query_attention"))
        if used and type(whole) is int and type(count) is int and (count < 1 or whole % count):
            yield (
                f"its arguments contradict each other: --{name.replace('_', '-')} {whole} is no multiple of "
                f"--{by.replace('_', '-')} {count}"
            )


def _unknown_words(values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each value that is not among its flag's choices."""
    choices = {spec.name: spec.metadata["choices"] for spec in fields(ModelFlags) if spec.metadata}
    for name, value in values.items():
        if choices.get(name) and value not in choices[name]:
            yield f"it has --{name.replace('_', '-')} {printable(str(value)[:80])}"


def _is_on(given: Mapping[str, Any], name: str) -> bool:
    """Whether an argument is on. ``num_experts = [1]``, Megatron-DeepSpeed's default, is off."""
    return bool(given.get(name)) and not (name == "num_experts" and given[name] == [1])


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments as fields of our flags; most have the same name there."""
    known = {spec.name for spec in fields(ModelFlags)} - OF_THIS_RUN
    values: dict[str, Any] = {
        name: value for name, value in given.items() if name in known and isinstance(value, PLAIN)
    }
    values["normalization"] = _normalization(given.get("normalization"))
    values.setdefault("norm_epsilon", given.get("layernorm_epsilon", 1e-5))
    if given.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    tanh = given.get("bias_gelu_fusion") or given.get("openai_gelu")
    values["mlp_activation"] = "squared_relu" if given.get("squared_relu") else "gelu_tanh" if tanh else "gelu"
    if not given.get("group_query_attention"):
        values["num_query_groups"] = given.get("num_key_value_heads") or given.get("num_attention_heads")
    window = given.get("window_size")
    if isinstance(window, list | tuple) and window and window[0] >= 0:  # Megatron leaves out the token itself
        values["window_size"] = window[0] + 1
    return values


def _normalization(name: Any) -> str:
    return NORMS.get(name, name) if isinstance(name, str) else "LayerNorm"


def count_in(values: Mapping[str, Any], name: str) -> int | None:
    """The value of a name in a stranger's checkpoint if it is a whole number, not negative; else ``None``."""
    value = values.get(name)
    return value if type(value) is int and value >= 0 else None
