"""DeepSpeed's names: where each is in gptpar, in which of DeepSpeed's modules it is found, and which are refused.

``deepspeed.toml`` lists them, and the defaults of the configuration's sections.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

LIST = Path(__file__).with_name("deepspeed.toml")
FACTS = tomllib.loads(LIST.read_text(encoding="utf-8"))

VERSION: str = FACTS["version"]
"""The version of DeepSpeed whose names and meanings these are."""


def _homes() -> Iterator[tuple[str, str]]:
    for module, words in FACTS["homes"].items():
        for word in words.split():
            name, _, attribute = word.partition("=")
            is_module = word.endswith("=")
            yield name, module if is_module else f"{module}:{attribute or name}"


HOMES: Mapping[str, str] = dict(_homes())
"""Name -> the module of gptpar or torch, and the attribute there, which is that name."""

PLACES: Mapping[str, str] = {
    place: " ".join(FACTS["groups"][word[1:]] if word[0] == "@" else word for word in words.split())
    for place, words in FACTS["places"].items()
}
"""Module of DeepSpeed -> its names here."""

EVERYTHING_OF: Mapping[str, str] = FACTS["everything_of"]
"""Module of DeepSpeed -> a module that has its other names."""

REFUSED: Mapping[str, str] = {remedy: names for names, remedy in FACTS["refused"].items()}
"""What a program can do instead -> the names that are refused with it."""

ABSENT: Mapping[str, str] = {place: remedy for places, remedy in FACTS["absent"].items() for place in places.split()}
"""Module of DeepSpeed that gptpar has not, with those inside -> what a program can do instead."""
