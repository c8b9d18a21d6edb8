"""The text that a run learns from: Python's library, files with a fingerprint, or flags of ``gptpar pretrain``."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptpar.data.readers import find_inputs
from gptpar.errors import GptparError
from gptpar.system.files import open_regular

LIBRARY = "Python's standard library"
LIBRARY_BYTES = 12_000_000
COMMAND_LINE = "flags"
DATA_FLAGS = ("--data-path", "--train-data-path", "--mock-data")
TOKENIZER_FLAGS = ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--vocab-size")


@dataclass(frozen=True)
class TextFile:
    """The identity of a file when the run folder was made."""

    path: str
    size: int
    mtime_ns: int
    sha256: str

    @staticmethod
    def of(path: str, known: Mapping[str, TextFile]) -> TextFile:
        """Read the file, unless ``known`` has it with the same size and time of its last change."""
        path, status = os.path.realpath(path), os.stat(path)
        before = known.get(path)
        if before is not None and (before.size, before.mtime_ns) == (status.st_size, status.st_mtime_ns):
            return before
        with open_regular(path) as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return TextFile(path, status.st_size, status.st_mtime_ns, digest)


@dataclass(frozen=True)
class Text:
    """The source of a run's text.

    Attributes:
        source: ``LIBRARY``, ``COMMAND_LINE``, or the path in DATA.
        files: the files of DATA.
        flags: the flags for data and tokenizer on the command line.
    """

    source: str
    files: tuple[TextFile, ...] = ()
    flags: tuple[str, ...] = ()

    @staticmethod
    def of(data: str | None, given: Sequence[str], known: Text | None) -> Text:
        """The text that a command names, with the files' fingerprints.

        Args:
            data: the path in DATA.
            given: flags of ``gptpar pretrain``.
            known: the text with which the run folder was made; its unchanged files are not read again.

        Raises:
            DataError: the path does not exist, or has no readable file.
            GptparError: there are both DATA and data flags, or a tokenizer without data.
        """
        flags = _flags_with_values(given, (*DATA_FLAGS, *TOKENIZER_FLAGS))
        if any(word in DATA_FLAGS for word in flags):
            if data is not None:
                raise GptparError(f"DATA={data} and {' '.join(flags)} both say what to train on: keep one.")
            return Text(COMMAND_LINE, flags=flags)
        if flags:
            raise GptparError(
                f"{' '.join(flags)}: a tokenizer is trained on the text here; to bring your own, preprocess the text "
                "with it and give --data-path as well."
            )
        if data is None:
            return Text(LIBRARY)
        before = {file.path: file for file in known.files} if known is not None else {}
        files = sorted((TextFile.of(path, before) for path in find_inputs([data])), key=lambda file: file.path)
        return Text(os.path.realpath(data), tuple(files))

    @property
    def num_bytes(self) -> int:
        """Number of bytes that have to be tokenized."""
        return LIBRARY_BYTES if self.source == LIBRARY else sum(file.size for file in self.files)

    def difference(self, now: Text) -> str | None:
        """The difference of another command's text from this one, or ``None``; the files' times do not count."""
        if (self.source, self.flags) != (now.source, now.flags):
            return f"was made from {self.describe()}, and this command names {now.describe()}"
        then_, now_ = ({file.path: file.sha256 for file in text.files} for text in (self, now))
        changed = sorted(path for path in {*then_, *now_} if then_.get(path) != now_.get(path))
        if not changed:
            return None
        others = f" and {len(changed) - 1:,} more files" if len(changed) > 1 else ""
        return f"was made from {self.describe()}, whose content has changed since ({changed[0]}{others})"

    def describe(self) -> str:
        """The text's source as a part of a sentence."""
        if self.source == COMMAND_LINE:
            return " ".join(self.flags)
        return LIBRARY if self.source == LIBRARY else f"DATA={self.source}"

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Text:
        """The inverse of :func:`dataclasses.asdict`."""
        files = tuple(TextFile(**file) for file in values["files"])
        return Text(values["source"], files, tuple(values["flags"]))


def _flags_with_values(words: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...]:
    """The flags of ``words`` that are ``wanted``, each followed by its values; ``--flag=value`` becomes two words."""
    found: list[str] = []
    taking = False
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            taking = name in wanted
            found += [name, *([value] if equals else [])] if taking else []
        elif taking:
            found.append(word)
    return tuple(found)
