"""Goes through a DeepSpeed configuration, key by key. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gptpar.config.deepspeed_keys import KEYS, Absent, Elsewhere, NoEffect, Only, Rule, Sets, Tree

MAX_LISTED = 12


@dataclass(frozen=True)
class Said:
    """A key that says a field.

    Attributes:
        field: ``section.field``.
        raw: the value as the file writes it.
        why: what a reader of the banner should know.
        default: whether DeepSpeed says it, as the file does not.
    """

    field: str
    value: Any
    key: str
    raw: Any
    why: str
    default: bool

    def __str__(self) -> str:
        return f"{self.key} is {json.dumps(self.raw)}"


@dataclass
class KeyReader:
    """Collects what the keys say.

    Attributes:
        tree: the keys that there can be.
        default: whether it reads what DeepSpeed assumes instead of what a file says.
        said: values of fields, several for one field where several keys say it.
        problems: sentences, without the file's name.
        without_effect: keys that change nothing, each with the reason.
    """

    tree: Tree = field(default_factory=lambda: KEYS)
    default: bool = False
    said: list[Said] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)

    def walk(self, raw: Mapping[str, Any], tree: Tree | None = None, prefix: str = "") -> None:
        """Read an object whose keys are ``tree``'s (default: all); ``null`` and ``"auto"`` say nothing."""
        tree = self.tree if tree is None else tree
        for name, value in raw.items():
            key, rule = prefix + name, tree.get(name)
            if rule is None:
                self.problems.append(f"{key} is unknown{self._hint(name, prefix, tree)}")
            elif value is None or value == "auto":
                continue
            elif not isinstance(rule, Mapping):
                self._read(key, value, rule)
            elif isinstance(value, dict):
                self.walk(value, rule, f"{key}.")
            else:
                self._wrong(key, value, "an object in braces is needed")

    def _read(self, key: str, value: Any, rule: Rule) -> None:
        if isinstance(rule, Sets):
            try:
                self._set(key, value, rule)
            except ValueError as error:
                self._wrong(key, value, str(error))
        elif isinstance(rule, Only):
            if value not in rule.values:
                self._wrong(key, value, rule.why)
        elif isinstance(rule, Absent):
            if value and not (isinstance(value, dict) and value.get("enabled") is False):
                self.problems.append(f"{key}: {rule.what} is not part of gptpar; leave it out.")
        elif isinstance(rule, NoEffect):
            self.without_effect.append(f"{key}: {rule.why}")
            if rule.inside:
                inside: Tree = {key: dict.fromkeys(rule.inside, Elsewhere())}
                self.walk({key: value}, inside)

    def _set(self, key: str, value: Any, rule: Sets) -> None:
        read = rule.read(value)
        values = read if isinstance(read, list) else [read] * len(rule.fields)
        for name, one in zip(rule.fields, values, strict=True):
            self.said.append(Said(name, one, key, value, rule.why, self.default))

    def _wrong(self, key: str, value: Any, why: str) -> None:
        whose = ", DeepSpeed's default" if self.default else ""
        self.problems.append(f"{key} is {json.dumps(value)}{whose}: {why}.")

    def _hint(self, name: str, prefix: str, tree: Tree) -> str:
        """The nearest key beside it, else the nearest anywhere."""
        beside = {other: prefix + other for other in tree}
        for paths in (beside, dict(_paths(self.tree))):
            near = difflib.get_close_matches(name, paths, n=1, cutoff=0.6)
            if near:
                return f"; did you mean {paths[near[0]]}?"
        return f"; the keys there are {', '.join(tree)}." if len(tree) <= MAX_LISTED else "; leave it out."


def _paths(tree: Tree, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(last word, whole path) of every key."""
    for name, rule in tree.items():
        yield name, prefix + name
        if isinstance(rule, Mapping):
            yield from _paths(rule, f"{prefix}{name}.")
