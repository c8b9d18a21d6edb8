"""Makes a model's configuration from Megatron's arguments, and refuses those that gptpar lacks."""

from __future__ import annotations

import contextlib
import typing
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import fields
from math import isclose
from pathlib import Path
from typing import Any

from gptpar.config import ModelConfig, ModelFlags, TokenizerConfig
from gptpar.config.elsewhere import elsewhere
from gptpar.config.fields import flag_name, hints_of
from gptpar.config.layer_patterns import LAYER_LISTS, layer_pattern
from gptpar.config.sections.mlp import ExpertOptions
from gptpar.config.sections.model import check_model, complete_model
from gptpar.config.sections.positions import SCALED_BY
from gptpar.config.stored import stored_config
from gptpar.errors import CheckpointError, ConfigError, printable
from gptpar.exchange.megatron.names import FACTS

ABSENT_HERE: dict[str, str] = {
    **{name: what for what, names in FACTS["absent"].items() for name in names.split()},
    **dict.fromkeys(FACTS["forks"]["absent"].split(), ""),
}
"""Arguments of Megatron and its forks that must be off -> what each turns on; "": see the flag of the same name."""

NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "seq_length")
"""Arguments without which no model can be built; Megatron always has them."""

PLAIN = (bool, int, float, str)
OF_THIS_RUN = {
    *("preset", "make_vocab_size_divisible_by", "pad_vocab_size_to", "window_pattern", "rope_pattern"),
    *("mup", "mup_base_hidden_size", "mup_base_kv_channels", "no_rope_freq", "window_attn_skip_freq"),
    *("rope_scaling_type", *(name for name in SCALED_BY if name != "rope_scaling_factor")),  # of other positions there
    *ExpertOptions.__dataclass_fields__,
}
"""Fields of the flags that Megatron's arguments of the same name do not set."""


def model_of(arguments: Namespace, rows: int, path: Path) -> ModelConfig:
    """The model that Megatron's arguments describe.

    Args:
        rows: rows of the word embedding, padding included.

    Raises:
        CheckpointError: with all reasons why gptpar cannot compute the same model.
    """
    given = vars(arguments)
    values = _values(given) | {"padded_vocab_size": rows}
    config, _, wrong = stored_config({"model": values}, [f"model.{name}" for name in values])
    problems = [
        *_absent(given),
        *_windows(given),
        *_layer_lists(given),
        *(problem.replace("config.model.", "its ") for problem in wrong),
        *_uneven(given),
    ]
    problems += [] if problems else _lacking(given)
    try:
        problems += [] if wrong else check_model(config)
        if not problems:
            return complete_model(config.model, TokenizerConfig())
    except (TypeError, ValueError, ArithmeticError, AttributeError, ConfigError) as error:
        problems.append(f"its arguments are not those of a GPT: {printable(str(error)[:200])}")
    raise CheckpointError(f"gptpar cannot compute what the model in {path} does:\n" + "\n".join(problems))


def _absent(given: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each feature of Megatron's model that gptpar does not have."""
    on = {
        name: what or elsewhere().starts[flag_name(name)].why
        for name, what in ABSENT_HERE.items()
        if _is_on(given.get(name), FACTS["off"].get(name))
    }
    yield from (f"it has {what} ({flag_name(name)})" for name, what in on.items())
    scale, width = given.get("softmax_scale"), given.get("kv_channels")
    if scale is not None and not (
        isinstance(scale, int | float) and type(width) is int and width > 0 and isclose(scale, width**-0.5)
    ):
        yield f"it has another scale of attention's scores than 1 / sqrt(kv_channels) (--softmax-scale {_short(scale)})"


def _windows(given: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for windows that are not a pair of numbers, whose second is 0."""
    window = given.get("window_size")
    pair = isinstance(window, list | tuple) and len(window) == 2 and all(type(one) is int for one in window)
    if window is not None and (not pair or window[1] not in (0, -1)):
        yield f"its attention windows are no number of tokens before each token (--window-size {_short(window)})"


def _layer_lists(given: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for lists of layers that are none, or that have another number of layers."""
    for name, _, letters, most in LAYER_LISTS:
        value = given.get(name)
        try:
            found = layer_pattern(str(value), letters, most) if _is_on(value, None) else None
        except ValueError:
            found = ""
        if found == "" or (isinstance(value, list | tuple) and found and len(found) != given.get("num_layers")):
            yield f"its list of layers has not one 0 or 1 for each of its layers ({flag_name(name)} {_short(value)})"


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


def _is_on(value: object, off: list[object] | None) -> bool:
    """Whether an argument is on; an object of another program's class is."""
    if not isinstance(value, (*PLAIN, list, tuple, type(None))):
        return True
    return bool(value) if off is None else value is not None and value not in off


def _short(value: object) -> str:
    return printable(str(value)[:80])


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron's arguments as fields of our flags; most have the same name there."""
    hints = hints_of(ModelFlags)
    values: dict[str, Any] = {
        spec.name: _value(given[spec.name], hints[spec.name], spec.metadata.get("spellings", {}))
        for spec in fields(ModelFlags)
        if spec.name not in OF_THIS_RUN and given.get(spec.name) is not None
    }
    values.setdefault("norm_epsilon", given.get("layernorm_epsilon", 1e-5))
    if _is_on(given.get("layernorm_zero_centered_gamma"), None):  # the name of --apply-layernorm-1p in newer versions
        values["apply_layernorm_1p"] = True
    if _is_on(given.get("use_rotary_position_embeddings"), None):
        values["position_embedding_type"] = "rope"
    if given.get("add_position_embedding") is False and values.get("position_embedding_type") == "learned_absolute":
        values["position_embedding_type"] = "none"
    if values.get("glu_activation") == "swiglu":
        values["swiglu"] = True
    if not _is_on(values.get("swiglu"), None):
        values["mlp_activation"] = values.get("glu_activation") or _activation(given)
    if not _is_on(given.get("group_query_attention"), None):
        values["num_query_groups"] = given.get("num_key_value_heads") or given.get("num_attention_heads")
    match values.pop("window_size", None):
        case [int(before), _] if before >= 0:
            values["window_size"] = before + 1  # Megatron leaves out the token itself
    return values | _patterns(given, values)


def _patterns(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Which layers have positions and windows, where the model has these at all."""
    has = {"rope_pattern": values.get("position_embedding_type") == "rope", "window_pattern": "window_size" in values}
    found = {}
    for name, pattern, letters, most in LAYER_LISTS:
        if has[pattern] and _is_on(given.get(name), None):
            with contextlib.suppress(ValueError):  # reported by _layer_lists
                found[pattern] = layer_pattern(str(given[name]), letters, most)
    return found


def _value(value: Any, hint: Any, spellings: Mapping[str, str]) -> Any:
    """An argument as a flag's value: our word for theirs, and a whole number where one belongs."""
    if isinstance(value, str):
        return spellings.get(value, value)
    is_whole = isinstance(value, float) and value.is_integer() and float not in (hint, *typing.get_args(hint))
    return int(value) if is_whole else value


def _activation(given: Mapping[str, Any]) -> str:
    """The activation of an MLP without a gate: GELU in its tanh form is what Megatron's fused kernels compute.

    Megatron turns its own kernel off where linear layers have no biases. Models of Megatron Core pass over
    ``--openai-gelu``, which asks the legacy ones for the tanh form.
    """
    if _is_on(given.get("squared_relu"), None):
        return "squared_relu"
    fused = given.get("bias_gelu_fusion", given.get("add_bias_linear", True))
    legacy = not _is_core(given) and given.get("openai_gelu")
    tanh = (fused, legacy, given.get("use_te_activation_func"))
    return "gelu_tanh" if any(_is_on(one, None) for one in tanh) else "gelu"


def _is_core(given: Mapping[str, Any]) -> bool:
    """Whether the model is Megatron Core's: once by ``--use-mcore-models``, now but for ``--use-legacy-models``."""
    later = "use_legacy_models" in given or "deprecated_use_mcore_models" in given
    return _is_on(given.get("use_mcore_models"), None) or (later and not _is_on(given.get("use_legacy_models"), None))


def count_in(values: Mapping[str, Any], name: str) -> int | None:
    """The value of a name in a stranger's checkpoint if it is a whole number, not negative; else ``None``."""
    value = values.get(name)
    return value if type(value) is int and value >= 0 else None
