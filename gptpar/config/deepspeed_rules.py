"""The rules for keys of a DeepSpeed configuration, and the readers of their values."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeAlias

OFF = object()
"""The result of a reader for a value that turns nothing on."""


@dataclass(frozen=True)
class Sets:
    """The key sets a field of the configuration, or several fields with a list.

    Attributes:
        read: the JSON value -> the field's value, or ``OFF``; a ``ValueError`` says what is needed instead.
        to: fields as ``section.field``, separated by spaces.
        why: a remark for the banner.
        inside: the keys that the value may hold, if it is an object.
        off: a remark for the banner about a value that turns nothing on.
    """

    read: Callable[[Any], Any]
    to: str = ""
    why: str = ""
    inside: str = ""
    off: str = "it is off"


@dataclass(frozen=True)
class NoEffect:
    """The key is known and has no effect; ``inside``: the keys that its value may hold, if it is an object."""

    why: str
    inside: str = ""


@dataclass(frozen=True)
class Only:
    """The key may have these values, which change nothing; ``why``: the reason against others, and the remedy."""

    values: tuple[object, ...]
    why: str


def turned_on(value: Any) -> bool:
    """Whether a section or a switch turns its thing on."""
    return bool(value) and not (isinstance(value, dict) and value.get("enabled") is False)


@dataclass(frozen=True)
class Absent:
    """The key turns on something that gptpar lacks; a value that turns it off is accepted.

    Attributes:
        what: the missing thing.
        is_on: whether a value turns it on.
    """

    what: str
    is_on: Callable[[Any], bool] = turned_on


@dataclass(frozen=True)
class NotRead:
    """The key is known, but belongs to something that is refused as a whole."""


Rule: TypeAlias = Sets | NoEffect | Only | Absent | NotRead
Tree: TypeAlias = "dict[str, Rule | Tree]"


class Door(Enum):
    """The two readers of a configuration."""

    PRETRAIN = auto()
    ENGINE = auto()


@dataclass(frozen=True)
class Key:
    """A row of the table.

    Attributes:
        path: the key's path, with dots.
        pretrain, engine: its rule at each door; ``engine=None``: the same rule.
        default: DeepSpeed's, if the file has the key's section but not the key; ``None``: gptpar's own default.
        of: ``type`` of the optimizers or schedules that have it, in small letters; empty: all.
    """

    path: str
    pretrain: Rule | None
    engine: Rule | None = None
    default: Any = None
    of: tuple[str, ...] = ()

    def rule(self, door: Door) -> Rule | None:
        """The rule at a door; ``None``: the key is unknown there."""
        return self.engine if door is Door.ENGINE and self.engine is not None else self.pretrain


# --- readers of values ----------------------------------------------------------------------------------------------


def whole(value: Any) -> int:
    """A whole number, which may be written as 5e8."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or abs(value) >= 2**63:
        raise ValueError("a whole number is needed")
    return int(value)


def interval(value: Any) -> object:
    """A whole number of steps; ``OFF`` for Infinity, which no step reaches."""
    return OFF if value == math.inf else whole(value)


def positive(value: Any) -> int:
    """A whole number of at least 1."""
    if whole(value) < 1:
        raise ValueError("a whole number of at least 1 is needed")
    return whole(value)


def number(value: Any) -> float:
    """Any number that a float can hold; JSON writes others, too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError("a number is needed")
    return float(value)


def share(value: Any) -> float:
    """A number from 0 to 1."""
    if not 0 <= number(value) <= 1:
        raise ValueError("a number from 0 to 1 is needed")
    return number(value)


def truth(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false is needed")
    return value


WORDS = {
    **dict.fromkeys(("true", "yes", "on", "t", "y", "1"), True),
    **dict.fromkeys(("false", "no", "off", "f", "n", "0"), False),
}
"""Texts that DeepSpeed's checked sections (pydantic) read as true or false."""


def true_in_words(value: Any) -> bool:
    """true or false, which may be a text in a section that DeepSpeed checks."""
    return truth(WORDS.get(value.lower(), value) if isinstance(value, str) else value)


def if_true(value: Any) -> object:
    """True, or ``OFF`` for false: a switch that only turns something on."""
    return True if truth(value) else OFF


def text(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError("a text is needed")
    return value


def rates(value: Any) -> float | tuple[float, ...]:
    """One rate for all parameter groups, or a rate for each group."""
    return tuple(map(number, value)) if isinstance(value, list) else number(value)


def one_rate(value: Any) -> float:
    """One rate for all parameter groups."""
    if isinstance(value, list):
        raise ValueError("one rate is needed: the groups that decay and those that do not have the same")
    return number(value)


def betas(value: Any) -> list[float]:
    """Two numbers."""
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two numbers in brackets are needed")
    return [number(beta) for beta in value]


def scale_of_power(value: Any) -> float:
    """A loss scale from its exponent of two."""
    if not 0 <= whole(value) <= 127:
        raise ValueError("a whole number from 0 to 127 is needed")
    return 2.0 ** whole(value)


def word_of(meanings: Mapping[str, Any], otherwise: str = "") -> Callable[[Any], Any]:
    """A reader of one of these words; ``otherwise``: the error for any other value."""

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in meanings:
            raise ValueError(otherwise or f"one of {', '.join(meanings)} is needed")
        return meanings[value]

    return read


def parameters_on_cpu(value: Any) -> bool:
    """Whether parameters are in host memory."""
    if value == "nvme":
        raise ValueError('parameters on NVMe are not part of this version yet; "cpu" and "none" are')
    return bool(word_of({"none": False, "cpu": True})(value))


def switch(value: Any) -> str:
    """``on`` or ``off``; ``"auto"`` counts as an absent key."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value not in ("on", "off"):
        raise ValueError('true, false or "auto" is needed')
    return str(value)


def tag_validation(value: Any) -> str:
    """Read what to do about a tag that differs between processes: ``ignore``, ``warn`` or ``fail``."""
    if not isinstance(value, str) or value.lower() not in ("ignore", "warn", "fail"):
        raise ValueError("Ignore, Warn or Fail is needed")
    return value.lower()


def class_names(value: Any) -> tuple[str, ...]:
    """Names of modules' classes."""
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise ValueError('a list of class names is needed, for example ["GPT2Block"]')
    return tuple(value)


def partition(value: Any) -> str:
    """The method that divides a list of layers into stages."""
    if not isinstance(value, str):
        raise ValueError("parameters, uniform, type:REGEX or boundaries such as 0,7,14 are needed")
    return "parameters" if value == "best" else value


def if_enabled(read: Callable[[Mapping[str, Any]], Any]) -> Callable[[Any], Any]:
    """A reader of a section that counts only if it is ``enabled``."""

    def read_section(value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("an object in braces is needed")
        return read(value) if true_in_words(value.get("enabled", False)) else OFF

    return read_section


def monitor_folder(section: Mapping[str, Any]) -> str:
    """The folder of a DeepSpeed monitor's files."""
    return os.path.join(str(section.get("output_path") or ""), text(section.get("job_name", "DeepSpeedJobName")))


def wandb_words(section: Mapping[str, Any]) -> list[object]:
    """Project, team and group; what is not named is left open, but for DeepSpeed's project."""
    names = [section.get("project") or "deepspeed", section.get("team"), section.get("group")]
    return [OFF if name is None else text(name) for name in names]


def asks_for_routing(value: Any) -> bool:
    """Whether ``data_efficiency`` turns anything on; its parts have switches of their own."""
    parts = [value.get(name, {}) for name in ("data_sampling", "data_routing")] if isinstance(value, dict) else [value]
    on = not isinstance(value, dict) or value.get("enabled") is True
    return on and any(part.get("enabled") is True if isinstance(part, dict) else bool(part) for part in parts)


def asks_for_sparsity(value: Any) -> bool:
    """Whether ``sparse_attention`` asks for another attention than the dense one."""
    return turned_on(value) and not (isinstance(value, dict) and value.get("mode") == "dense")


def asks_for_parallelism(value: Any) -> bool:
    """Whether ``tensor_parallel`` asks for more than one process."""
    sizes = [value.get("autotp_size", 1), value.get("tp_size", 1)] if isinstance(value, dict) else [value]
    off = isinstance(value, dict) and value.get("enabled") is False
    return not off and any(size not in (0, 1, False, None) for size in sizes)
