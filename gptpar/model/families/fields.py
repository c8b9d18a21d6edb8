"""Reads a ``config.json``'s rotary positions, windows and activations, and refuses values that gptpar lacks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gptpar.config import ModelConfig
from gptpar.config.sections.positions import SCALED_BY
from gptpar.errors import printable
from gptpar.model.attention import is_rotary, window_of
from gptpar.model.rotary import yarn_amplitude
from gptpar.system.files import facts_in

_NAMES = facts_in("activations.toml", __file__)
ACTIVATIONS: dict[str, str] = _NAMES["activations"]
"""transformers' name of an activation function -> ``--mlp-activation``."""

GATES: dict[str, str] = _NAMES["gates"]
"""transformers' name of the activation function in a gated MLP -> ``--glu-activation``."""

GATES_BACK = {ours: theirs for theirs, ours in reversed(GATES.items())}
"""``--glu-activation`` -> the name that transformers' own models use."""

ACTIVATIONS_BACK = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""``--mlp-activation`` -> the name that transformers' own models use."""


def activation_field(model: ModelConfig) -> str:
    """transformers' name of an MLP's activation function; for a gated MLP GELU's, so that the models differ."""
    return ACTIVATIONS_BACK.get(model.mlp_activation, "gelu")


def gate_field(model: ModelConfig) -> str:
    """transformers' name of a gated MLP's activation function; another MLP has SiLU's, which tells them apart."""
    return GATES_BACK.get(model.mlp_activation, "silu")


SCALINGS = SCALED_BY["rope_scaling_factor"]
"""Forms of scaled rotary frequencies; transformers has the same names."""

WITH_WINDOW, WITHOUT = "sliding_attention", "full_attention"
"""Entries of ``layer_types``."""

YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attention_factor"}
"""transformers' number of YaRN -> ours."""

MAX_SIZE = 2**31 - 1
"""Largest width, count or vocabulary: token ids have 32 bits."""

_KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int, float), "a number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    str: ((str,), "a text"),
    list: ((list,), "a list"),
    dict: ((dict,), "an object"),
}
"""Kind of a field's default -> kinds of values that the field may have, and what they are called."""


def _shown(value: object) -> str:
    return printable(json.dumps(value)[:80])


class HfConfig:
    """The fields of one ``config.json``.

    Attributes:
        problems: a sentence for each field whose value cannot be reproduced.
    """

    def __init__(self, fields: Mapping[str, Any]):
        self._fields = fields
        self.problems: list[str] = []

    def __getitem__(self, name: str) -> int:
        """A required size; 1, and a problem noted, if the field is none.

        Raises:
            KeyError: it is missing.
        """
        value = self._fields.get(name)
        if value is None:
            raise KeyError(name)
        return self._size_of(name, value)

    def size(self, name: str, default: int, missing: int | None = None) -> int:
        """A size, or its default where the field is ``null``; 1, and a problem noted, if it is none.

        Args:
            missing: the size where the field is missing; ``None``: the default.
        """
        value = self._fields.get(name, missing)
        return default if value is None else self._size_of(name, value)

    def _size_of(self, name: str, value: object) -> int:
        if type(value) is int and 1 <= value <= MAX_SIZE:
            return value
        most = f" to {MAX_SIZE:,}" if type(value) is int and value > MAX_SIZE else ""
        self.problems.append(f"{name} is {_shown(value)}; a whole number from 1{most} is needed.")
        return 1

    def positive(self, name: str, default: float) -> float:
        """A number above 0, or its default; the default, and a problem noted, if the field is another number."""
        value = self.get(name, default)
        if value > 0:
            return float(value)
        self.problems.append(f"{name} is {_shown(value)}; a number above 0 is needed.")
        return default

    def get(self, name: str, default: Any) -> Any:
        """A field, or its default where it is missing or ``null``, or, with a problem noted, of another kind."""
        value = self._fields.get(name)
        if value is None:
            return default
        kinds, needed = _KINDS[type(default)]
        if type(value) not in kinds:
            self.problems.append(f"{name} is {_shown(value)}; {needed} is needed.")
            return default
        if isinstance(value, float) and not math.isfinite(value):
            self.problems.append(f"{name} is {_shown(value)}; a finite number is needed.")
            return default
        return value

    def require(self, name: str, value: Any, why: str, *, default: Any = None) -> None:
        """Note a problem unless a field has this value.

        Args:
            default: the value of a missing field; ``None``: the required value.
        """
        if (found := self.get(name, value if default is None else default)) != value:
            self.problems.append(f"{name} is {found!r}, and gptpar computes with {value!r} alone: {why}.")

    def activation(self, name: str, default: str) -> str:
        """The ``--mlp-activation`` that a field names."""
        found = self.get(name, default)
        if found not in ACTIVATIONS:
            self.problems.append(f"{name} is {found!r}, and gptpar has {', '.join(ACTIVATIONS)}.")
        return ACTIVATIONS.get(found, "gelu")

    def gate(self, name: str) -> dict[str, Any]:
        """The flags of the gated MLP whose activation function a field names."""
        found = self.get(name, "silu")
        if found not in GATES:
            self.problems.append(f"{name} is {found!r}, and a gated MLP of gptpar's has {', '.join(GATES)}.")
        kind = GATES.get(found, "swiglu")
        return {"swiglu": True} if kind == "swiglu" else {"mlp_activation": kind}

    def rotary(self, default_base: float, default_share: float = 1.0) -> dict[str, Any]:
        """The flags for rotary positions: transformers 5 has one dictionary of them, version 4 had a field each."""
        together = self.get("rope_parameters", {})
        scaling = self.get("rope_scaling", {})
        inner = HfConfig(together)
        base = inner.positive("rope_theta", self.positive("rope_theta", self.positive("rotary_emb_base", default_base)))
        share = inner.positive("partial_rotary_factor", self.positive("rotary_pct", default_share))
        self.problems += inner.problems
        kind = together.get("rope_type", scaling.get("rope_type", scaling.get("type", "default")))
        scaled = self._scaled(kind, {**scaling, **together})
        if base != int(base):
            self.problems.append(f"rope_theta is {base}, and --rotary-base is a whole number.")
        return {"position_embedding_type": "rope", "rotary_base": int(base), "rotary_percent": float(share), **scaled}

    def _scaled(self, kind: object, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The flags for scaled rotary frequencies; what transformers derives from the length of samples, too."""
        if kind == "default":
            return {}
        if kind not in SCALINGS:
            self.problems.append(
                f"rope_type is {kind!r}, and gptpar has rotary positions of default, {', '.join(SCALINGS)} alone."
            )
            return {}
        numbers, length = HfConfig(fields), self["max_position_embeddings"]
        context = self.size(
            "original_max_position_embeddings", numbers.size("original_max_position_embeddings", length)
        )
        factor = float(numbers.get("factor", length / context if kind == "yarn" else 0.0))
        if factor < 1 and not numbers.problems:
            numbers.problems.append(f"factor is {_shown(fields.get('factor'))}; a number from 1 is needed.")
        flags: dict[str, Any] = {"rope_scaling_type": kind, "rope_scaling_factor": max(factor, 1.0)}
        if kind == "dynamic":  # transformers has no other place for this length
            flags |= {"original_max_position_embeddings": length, "max_position_embeddings": None}
        elif kind != "linear":
            flags |= {"original_max_position_embeddings": context}
            flags |= _limits_of_llama(numbers) if kind == "llama3" else _numbers_of_yarn(numbers, fields, factor)
        self.problems += [problem.replace(" is ", " of the rotary positions is ", 1) for problem in numbers.problems]
        return flags

    def window_pattern(self, sliding: Sequence[bool]) -> str:
        """A letter for each layer: S with a window, F without, as ``layer_types`` says.

        Args:
            sliding: whether each layer has a window where no field says so.
        """
        kinds = self.get("layer_types", [WITH_WINDOW if has else WITHOUT for has in sliding])
        if len(kinds) != len(sliding) or any(kind not in (WITH_WINDOW, WITHOUT) for kind in kinds):
            self.problems.append(
                f"layer_types has {len(kinds):,} entries for {len(sliding):,} layers, or others than {WITH_WINDOW} and "
                f"{WITHOUT}: one of these for each layer is needed."
            )
            return ""
        return "".join("S" if kind == WITH_WINDOW else "F" for kind in kinds)

    def windows(self, sliding: Sequence[bool] | None = None) -> dict[str, Any]:
        """The flags for sliding windows.

        Args:
            sliding: whether each layer has one where no field says so; ``None``: all from ``max_window_layers`` on.
        """
        layers = self["num_hidden_layers"]
        if not self.get("use_sliding_window", False):
            return {}
        if sliding is None:
            full = self.get("max_window_layers", 28)
            sliding = [layer >= full for layer in range(layers)]
        if "S" not in (pattern := self.window_pattern(sliding)):
            return {}
        return {"window_size": self["sliding_window"], "window_pattern": shortest_period(pattern)}


def _limits_of_llama(numbers: HfConfig) -> dict[str, Any]:
    low, high = (numbers.positive(name, 0.0) for name in ("low_freq_factor", "high_freq_factor"))
    if low >= high and not numbers.problems:
        numbers.problems.append(f"low_freq_factor is {low:g}; less than high_freq_factor, {high:g}, is needed.")
    return {"low_freq_factor": low, "high_freq_factor": high}


def _numbers_of_yarn(numbers: HfConfig, fields: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Transformers derives the factor of queries and keys from two scales where it is not said."""
    flags: dict[str, Any] = {ours: numbers.positive(name, 0.0) for name, ours in YARN.items() if fields.get(name)}
    flags["yarn_correction_range_round_to_int"] = numbers.get("truncate", True)
    scales = [numbers.get(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    if all(scales) and not fields.get("attention_factor") and factor >= 1:
        over, under = (yarn_amplitude(factor, scale) for scale in scales)
        flags["yarn_attention_factor"] = over / under
    return flags


def shortest_period(pattern: Sequence[str]) -> str:
    """The shortest prefix whose repetition begins with the pattern."""
    text = "".join(pattern)
    return next(text[:n] for n in range(1, len(text) + 1) if all(text[i] == text[i % n] for i in range(len(text))))


def rotary_fields(model: ModelConfig, **more: Any) -> dict[str, Any]:
    """The fields for rotary positions, as versions 4 and 5 of transformers read them."""
    base, kind = float(model.rotary_base), model.rope_scaling_type
    if kind is None:
        return {"rope_theta": base, "rope_parameters": {"rope_theta": base, "rope_type": "default", **more}}
    scaling = {"rope_type": kind, "factor": model.rope_scaling_factor}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = model.original_max_position_embeddings
    if kind == "llama3":
        scaling |= {"low_freq_factor": model.low_freq_factor, "high_freq_factor": model.high_freq_factor}
    if kind == "yarn":
        scaling |= {name: value for name, ours in YARN.items() if (value := getattr(model, ours)) is not None}
        scaling["truncate"] = model.yarn_correction_range_round_to_int
    return {"rope_theta": base, "rope_parameters": {"rope_theta": base, **scaling, **more}, "rope_scaling": scaling}


def positions_field(model: ModelConfig) -> int:
    """The length of samples; with dynamic scaling the original one, from which transformers stretches."""
    original = model.original_max_position_embeddings
    return original if model.rope_scaling_type == "dynamic" and original else model.max_position_embeddings


def rotary_layers(model: ModelConfig) -> list[bool]:
    """Whether each layer has rotary positions."""
    return [is_rotary(model, layer) for layer in range(model.num_layers)]


def windows_of(model: ModelConfig) -> list[int | None]:
    """Each layer's window, for samples of any length; ``None``: all earlier tokens."""
    long = replace(model, seq_length=1 << 62)
    return [window_of(long, layer) for layer in range(model.num_layers)]


def window_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields for sliding windows."""
    windows = windows_of(model)
    size = next((window for window in windows if window is not None), None)
    return {
        "layer_types": [WITHOUT if window is None else WITH_WINDOW for window in windows],
        "max_window_layers": next((i for i, window in enumerate(windows) if window is not None), model.num_layers),
        "sliding_window": size,
        "use_sliding_window": size is not None,
    }
