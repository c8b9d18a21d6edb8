"""A candidate: changes to a configuration, with a name; how they are applied, printed as flags, and refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gptpar.config import Config
from gptpar.config.derive import padded_vocab
from gptpar.config.fields import flag_name
from gptpar.config.flags import ParsedFlags
from gptpar.config.validate import resolve
from gptpar.topology.layout import Layout

Changes = Mapping[str, Any]
"""``section.field`` -> value: how a configuration differs from the command line's."""


@dataclass(frozen=True)
class Option:
    """One value in one dimension of the space.

    Attributes:
        changes: to the command line.
        name: a few words; empty where there is nothing to tell.
    """

    changes: Changes = field(default_factory=dict)
    name: str = ""


UNCHANGED = Option()

Dimension = Callable[[Layout], Sequence[Option]]
"""The options that a layout has, in the order in which they are tried; at least one."""


@dataclass(frozen=True)
class Candidate(Option):
    """One option in each dimension.

    Attributes:
        layout: sizes of the axes. Its product may differ from the number of processes: then it cannot be.
    """

    layout: Layout = Layout()

    def applied_to(self, config: Config) -> Config:
        """A configuration with the changes."""
        return with_changes(config, self.changes)

    @property
    def flags(self) -> list[str]:
        """The changes as words of a command line."""
        return flags_of(self.changes)


def product(layouts: Iterable[Layout], dimensions: Sequence[Dimension]) -> Iterator[Candidate]:
    """Every layout with every combination of its options; the last dimension varies fastest."""
    for layout in layouts:
        for options in itertools.product(*(dimension(layout) for dimension in dimensions)):
            changes = {name: value for option in options for name, value in option.changes.items()}
            yield Candidate(changes, ", ".join(filter(None, (option.name for option in options))), layout)


def with_changes(config: Config, changes: Changes) -> Config:
    """A configuration with some fields changed."""
    for name, value in changes.items():
        section, key = name.split(".")
        config = config.update(section, **{key: value})
    return config


def flags_of(changes: Changes) -> list[str]:
    """Changes as words of a command line. What is off, or not set, has no word."""
    words: list[str] = []
    for name, value in changes.items():
        if value is None or value is False:
            continue
        words.append(flag_name(name.split(".")[1]))
        if value is not True:
            words += map(str, value if isinstance(value, tuple) else (value,))
    return words


def configured(config: Config, world_size: int) -> Config:
    """The configuration that a run on a number of processes has: with what follows from the flags, and checked.

    Raises:
        ConfigError: it cannot be; with every reason.
    """
    config, _ = resolve(ParsedFlags(config), world_size)
    vocabulary = padded_vocab(config.tokenizer.vocab_size or 0, config.model.make_vocab_size_divisible_by)
    return config.update("model", padded_vocab_size=vocabulary)
