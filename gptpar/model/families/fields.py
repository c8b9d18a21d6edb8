"""Reads a ``config.json``'s rotary positions, windows and activations, and refuses values that gptpar lacks."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gptpar.config import ModelConfig
from gptpar.errors import printable
from gptpar.model.attention import window_of
from gptpar.model.rotary import LONGEST, SCALED_CONTEXT, SHORTEST

_NAMES = tomllib.loads(Path(__file__).with_name("activations.toml").read_text(encoding="utf-8"))
ACTIVATIONS: dict[str, str] = _NAMES["activations"]
"""transformers' name of an activation function -> ``--mlp-activation``."""

GATES: dict[str, str] = _NAMES["gates"]
"""transformers' name of the activation function in a gated MLP -> ``--glu-activation``."""

GATES_BACK = {ours: theirs for theirs, ours in reversed(GATES.items())}
"""``--glu-activation`` -> the name that transformers' own models use."""

ACTIVATIONS_BACK = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
"""``--mlp-activation`` -> the name that transformers' own models use."""


def activation_field(model: ModelConfig) -> str:
    """transformers' name of an MLP's activation function; a gate has GELU's, which tells them apart."""
    return ACTIVATIONS_BACK.get(model.mlp_activation, "gelu")


def gate_field(model: ModelConfig) -> str:
    """transformers' name of a gated MLP's activation function; another MLP has SiLU's, which tells them apart."""
    return GATES_BACK.get(model.mlp_activation, "silu")


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": float(LONGEST),
    "high_freq_factor": float(SHORTEST),
    "original_max_position_embeddings": SCALED_CONTEXT,
}
"""transformers' fields of Llama 3.1's rotary positions, but for the factor."""


MAX_SIZE = 2**31 - 1
"""Of a width, a count or a vocabulary: token ids have 32 bits."""

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

    def size(self, name: str, default: int) -> int:
        """A size, or its default where the field is missing or ``null``; 1, and a problem noted, if it is none."""
        value = self._fields.get(name)
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
        return {
            "position_embedding_type": "rope",
            "rotary_base": int(base),
            "rotary_percent": float(share),
            **scaled,
        }

    def _scaled(self, kind: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
        """The flags for Llama 3.1's scaling of rotary positions."""
        if kind not in ("default", LLAMA3["rope_type"]):
            self.problems.append(f"rope_type is {kind!r}, and gptpar has rotary positions of default and llama3 alone.")
        if kind != LLAMA3["rope_type"]:
            return {}
        for name, value in LLAMA3.items():
            if name != "rope_type" and (found := numbers.get(name)) != value:
                self.problems.append(f"{name} of the rotary positions is {found}, and gptpar computes with {value}.")
        factor = numbers.get("factor", 0)
        if type(factor) not in (int, float) or not 1 <= factor < math.inf:
            self.problems.append(f"factor of the rotary positions is {_shown(factor)}; a number from 1 is needed.")
            factor = 1
        return {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}

    def windows(self) -> dict[str, Any]:
        """The flags for sliding windows."""
        layers = self["num_hidden_layers"]
        if not self.get("use_sliding_window", False):
            return {}
        full = self.get("max_window_layers", 28)
        kinds = self.get("layer_types", ["full_attention" if i < full else "sliding_attention" for i in range(layers)])
        pattern = "".join("S" if kind == "sliding_attention" else "F" for kind in kinds)
        if "S" not in pattern:
            return {}
        return {"window_size": self["sliding_window"], "window_pattern": shortest_period(pattern)}


def shortest_period(pattern: Sequence[str]) -> str:
    """The shortest prefix whose repetition begins with the pattern."""
    text = "".join(pattern)
    return next(text[:n] for n in range(1, len(text) + 1) if all(text[i] == text[i % n] for i in range(len(text))))


def rotary_fields(model: ModelConfig, **more: Any) -> dict[str, Any]:
    """The fields for rotary positions, as versions 4 and 5 of transformers read them."""
    base = float(model.rotary_base)
    if not model.use_rope_scaling:
        return {"rope_theta": base, "rope_parameters": {"rope_theta": base, "rope_type": "default", **more}}
    scaling = {**LLAMA3, "factor": model.rope_scaling_factor}
    return {"rope_theta": base, "rope_parameters": {"rope_theta": base, **scaling, **more}, "rope_scaling": scaling}


def windows_of(model: ModelConfig) -> list[int | None]:
    """Each layer's window, for samples of any length; ``None``: all earlier tokens."""
    long = replace(model, seq_length=1 << 62)
    return [window_of(long, layer) for layer in range(model.num_layers)]


def window_fields(model: ModelConfig) -> dict[str, Any]:
    """The fields for sliding windows."""
    windows = windows_of(model)
    size = next((window for window in windows if window is not None), None)
    return {
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "max_window_layers": next((i for i, window in enumerate(windows) if window is not None), model.num_layers),
        "sliding_window": size,
        "use_sliding_window": size is not None,
    }
