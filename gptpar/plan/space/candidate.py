"""``Candidate``: changes to a configuration, with a name; how they are applied, printed as flags, and refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gptpar.config import Config, Flags
from gptpar.config.fields import as_word, flag_name
from gptpar.config.flags import ParsedFlags
from gptpar.config.validate import resolve
from gptpar.topology.mesh import Mesh

Changes = Mapping[str, Any]
"""``section.field`` -> value: how a configuration differs from the command line's."""


@dataclass(frozen=True)
class Option:
    """One value in one dimension of the space.

    Attributes:
        changes: how the configuration differs from the command line's.
        name: a few words for it; empty if there is no difference.
    """

    changes: Changes = field(default_factory=dict)
    name: str = ""


UNCHANGED = Option()
"""The command line's own value."""

Dimension = Callable[[Mesh], Sequence[Option]]
"""The options that a layout has, in the order in which they are tried; at least one."""


@dataclass(frozen=True)
class Candidate(Option):
    """One option in each dimension.

    Attributes:
        mesh: sizes of the axes. If their product is not the number of processes, the candidate is impossible.
    """

    mesh: Mesh = Mesh()

    def applied_to(self, flags: Flags) -> Flags:
        """The flags with the changes."""
        return flags.with_values(self.changes)

    @property
    def flags(self) -> list[str]:
        """The changes as words of a command line."""
        return flags_of(self.changes)


def product(layouts: Iterable[Mesh], dimensions: Sequence[Dimension]) -> Iterator[Candidate]:
    """Every layout with every combination of its options; the last dimension varies fastest."""
    for mesh in layouts:
        for options in itertools.product(*(dimension(mesh) for dimension in dimensions)):
            changes = {name: value for option in options for name, value in option.changes.items()}
            yield Candidate(changes, ", ".join(filter(None, (option.name for option in options))), mesh)


def flags_of(changes: Changes) -> list[str]:
    """Changes as words of a command line. A switch that is off, or a value that is not set, has no word."""
    words: list[str] = []
    for name, value in changes.items():
        if value is None or value is False:
            continue
        words.append(flag_name(name.split(".")[1]))
        if value is not True:
            words += map(as_word, value if isinstance(value, tuple) else (value,))
    return words


def configured(flags: Flags, world_size: int) -> Config:
    """The complete, checked configuration of a run on a number of processes.

    Raises:
        ConfigError: it is impossible; names every reason.
    """
    return resolve(ParsedFlags(flags), world_size)[0]
