"""Reads the TOML file of ``--config FILE``, and writes the file that repeats a run.

Keys are flags without the dashes in front (``num-layers``; ``num_layers`` is the same), flat or in the sections that
``--help`` shows. A switch is ``true`` or ``false``; a flag with several values is a list.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptpar.config import flag_fields
from gptpar.config.fields import FlagField, flag_name, value_of
from gptpar.system.files import read_regular, replace_synced

FILE_NAME = "config.toml"
"""Name of the file in a run folder."""


@dataclass
class RunFile:
    """A file, read.

    Attributes:
        values: what it says, by ``section.field``.
        refused: fields whose values could not be read.
        problems: one sentence for each mistake, with the file and the key.
    """

    path: str
    values: dict[str, Any] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def complain(self, where: str, problem: str) -> None:
        """Note one more mistake."""
        self.problems.append(f"{self.path}: {where}: {problem}.")


def read_run_file(path: str) -> RunFile:
    """Read a file; what cannot be read is among its problems."""
    found = RunFile(path)
    try:
        raw = tomllib.loads(read_regular(path).decode())
    except OSError as error:
        return _unread(found, f"--config {path}: {error.strerror or error}.")
    except (ValueError, RecursionError) as error:  # TOML's errors, text that is not UTF-8, brackets in brackets
        return _unread(found, f"--config {path} is no TOML: {error}.")
    known = _known_keys()
    sections = {one.section for one, _ in known.values()}
    for key, value in raw.items():
        if not isinstance(value, dict):
            _read_key(key, value, "", known, found)
        elif key in sections:
            for inner, inner_value in value.items():
                _read_key(inner, inner_value, key, known, found)
        else:
            near = difflib.get_close_matches(key, sections, n=1)
            hint = f"did you mean [{near[0]}]" if near else f"there are {', '.join(sorted(sections))}"
            found.complain(f"[{key}]", f"unknown section; {hint}, and keys may stand without sections, too")
    return found


def _unread(file: RunFile, problem: str) -> RunFile:
    """A file that cannot be read, and so may have said every flag."""
    file.problems.append(problem)
    file.refused |= {one.key for one in flag_fields()}
    return file


def _known_keys() -> dict[str, tuple[FlagField, bool]]:
    """Key, with dashes -> its field, and whether it says the contrary of the field."""
    known = {}
    for one in flag_fields():
        known[_key(one.spec.name)] = (one, False)
        known.update({_key(name): (one, False) for name in one.spec.metadata["names"]})
        if one.spec.metadata["off"]:
            known[_key(one.spec.metadata["off"])] = (one, True)
    return known


def _key(name: str) -> str:
    return name.strip("-").replace("_", "-")


def _read_key(
    key: str, value: object, section: str, known: Mapping[str, tuple[FlagField, bool]], found: RunFile
) -> None:
    where = f"{section}.{key}" if section else key
    if _key(key) not in known:
        near = difflib.get_close_matches(_key(key), known, n=1)
        hint = f"did you mean {near[0]}" if near else "see --help for the flags"
        found.complain(where, f"unknown key; {hint}")
        return
    one, is_contrary = known[_key(key)]
    if section and section != one.section:
        found.complain(where, f"this key belongs to [{one.section}]")
    elif one.key in found.values or one.key in found.refused:
        found.complain(where, "it is said twice, perhaps by two of its names")
    else:
        try:
            found.values[one.key] = _value(value, one, is_contrary)
            return
        except ValueError as error:
            found.complain(f"{where} = {str(value)[:80]}", str(error))
    found.refused.add(one.key)


def _value(value: object, one: FlagField, is_contrary: bool) -> Any:
    """The value of a key.

    Raises:
        ValueError: why it is none, as a part of a sentence.
    """
    if one.kind.scalar is bool:
        if not isinstance(value, bool):
            raise ValueError("true or false is needed")
        return value is not is_contrary
    if one.kind.several:
        values = value if isinstance(value, list) else [value]
        if not values:
            raise ValueError("at least one value is needed")
        return tuple(_scalar(word, one) for word in values)
    return _scalar(value, one)


def _scalar(value: object, one: FlagField) -> Any:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError("a number is needed" if one.kind.scalar in (int, float) else "a text is needed")
    return value_of(str(value), one.kind, one.spec.metadata)


def run_file_text(values: Mapping[str, Any], comment: str = "") -> str:
    """The file that says these values.

    Args:
        values: by ``section.field``, as ``read_run_file`` returns them.
        comment: its first lines.
    """
    return "\n".join([*(f"# {line}" for line in comment.splitlines()), *_lines(values)]) + "\n"


def _lines(values: Mapping[str, Any]) -> Iterator[str]:
    section = ""
    for one in flag_fields():
        if one.key not in values:
            continue
        if one.section != section:
            section = one.section
            yield f"\n[{section}]"
        off, value = one.spec.metadata["off"], values[one.key]
        yield f"{_key(off)} = {_toml(not value)}" if off else f"{_key(flag_name(one.spec.name))} = {_toml(value)}"


def _toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # JSON's escapes are TOML's, but for the one character that JSON leaves as it is
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def write_run_file(folder: Path, values: Mapping[str, Any], comment: str) -> None:
    """Keep a run's flags in its folder, where they are not there already.

    Raises:
        OSError: the folder cannot be written.
    """
    # A path may hold bytes that are no text: they are kept readable, for the file need not stop a run.
    text = run_file_text(values, comment).encode("utf-8", "backslashreplace").decode()
    path = folder / FILE_NAME
    if not path.is_file() or path.read_bytes() != text.encode():
        replace_synced(path, text)
