"""``ParsedFlags``: what a command line says, with the files that it names; its readers fill it one after another."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from typing import Any

from gptpar.config import Flags
from gptpar.config.fields import Derived


@dataclass
class ParsedFlags:
    """A command line, read.

    Attributes:
        flags: what it says; fields with a problem keep their default.
        problems: one sentence for each mistake.
        given: the fields that were set, as ``section.field``.
        typed: those of them that the command line or --config sets, with their values.
        from_config: those of them that --config alone sets.
        refused: the fields whose values could not be read.
        derived: values that no flag of ours says literally: those of presets, files and other programs' flags.
        without_effect: what is understood of other programs but changes nothing, each with the reason.
        launched: what another program's flags say of the process's place among others.
        deepspeed_file: the path of the DeepSpeed file that was read.
        deepspeed_keys: untyped flag -> the key of that file that sets it.
        rest: values of the extra flags a verb declares beyond the configuration's.
    """

    flags: Flags
    problems: list[str] = field(default_factory=list)
    given: set[str] = field(default_factory=set)
    typed: dict[str, Any] = field(default_factory=dict)
    from_config: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    derived: list[Derived] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)
    launched: dict[str, str] = field(default_factory=dict)
    deepspeed_file: str = ""
    deepspeed_keys: dict[str, str] = field(default_factory=dict)
    rest: argparse.Namespace = field(default_factory=argparse.Namespace)

    def as_written(self, problem: str) -> str:
        """A sentence about flags; a flag that a DeepSpeed file set is replaced by its key."""
        in_file = re.sub(r"--[\w-]+", lambda found: self.deepspeed_keys.get(found[0], found[0]), problem)
        return problem if in_file == problem else f"{self.deepspeed_file}: {in_file}"
