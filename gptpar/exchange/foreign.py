"""Recognises checkpoints of other programs by the names of their files; nothing is opened or unpickled.

A run must neither take such a folder for an empty one nor write into it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from gptpar.checkpoint.folders import HINT_NAME, find_checkpoints
from gptpar.checkpoint.manifest import MANIFEST_NAME
from gptpar.errors import printable
from gptpar.system.files import MAX_SMALL_BYTES, facts_in, read_regular

MAX_ENTRIES = 10_000
"""Names looked at in one folder: a folder of more is a data set."""

_CHECKPOINT_NAME = re.compile(
    r"(iter|step|epoch|checkpoint|ckpt|global_step)s?[-_=]?\d.*|\d+|release|last|best|latest", re.I
)


class ForeignReader(Enum):
    """The readers of other programs' checkpoints in ``gptpar convert``."""

    HUGGING_FACE = "huggingface"
    MEGATRON = "megatron"


@dataclass(frozen=True)
class Foreign:
    """Something that another program saved; its text names it: ``a DeepSpeed checkpoint (global_step100)``.

    Attributes:
        what: that text.
        reader: what ``gptpar convert`` reads it with; ``None``: nothing does.
        inside: the folder inside that the reader is given; "": the folder itself.
        is_our_hint: the only thing found is ``latest...``, a file name that gptpar uses as well.
        their_way: the end of a sentence: the program of their own that makes a Hugging Face folder of it; "": none is
            known.
        is_file: a file of the folder itself, whose name other things may have, too.
    """

    what: str
    reader: ForeignReader | None = None
    inside: str = ""
    is_our_hint: bool = False
    their_way: str = ""
    is_file: bool = False

    @property
    def lies_beside(self) -> bool:
        """Whether these files may lie beside other checkpoints: weights of Hugging Face's, or a stray file."""
        return self.is_file or self.reader is ForeignReader.HUGGING_FACE

    def __str__(self) -> str:
        return self.what


class _Format(NamedTuple):
    """A program's checkpoint; ``foreign.toml`` explains the fields."""

    what: str
    names: Sequence[str]
    certain: bool = True
    reader: ForeignReader | None = None
    their_way: str = ""


def _formats() -> Iterator[_Format]:
    for fields in facts_in("foreign.toml", __file__)["formats"]:
        reader = ForeignReader(fields["reader"]) if "reader" in fields else None
        yield _Format(**{**fields, "reader": reader})


_FORMATS = tuple(_formats())


def foreign_checkpoint(path: str | Path) -> Foreign | None:
    """Recognise what another program saved at a path.

    Args:
        path: a folder of checkpoints, one checkpoint, or a file.

    Returns:
        ``None`` where there is nothing of the kind, or where the folder holds a checkpoint of ours.
    """
    path = Path(path)
    if path.is_file():
        return _named(path.name, [path.name], certain=False)
    if holds_ours(path):
        return None
    names = _entries(path)
    if certain := _named("", names, certain=True):
        return certain
    found = _named("", names, certain=False)
    if found and found.reader:
        return found
    return _in_folders(path, names) or found or _pointer(path, names)  # a stray file may lie beside checkpoints


def why_not_to_load(path: str | Path, otherwise: str = "") -> str | None:
    """Why ``--load PATH`` cannot mean a folder of our checkpoints, and what to give; ``None``: it may.

    Args:
        otherwise: what else can be done about another program's checkpoint.
    """
    path = Path(path)
    found = foreign_checkpoint(path)
    if path.is_file():
        return f"--load {path} is a file{f': {found}' if found else ''}; give the folder of a run that gptpar saved."
    if _is_ours(path):
        named = re.fullmatch(r"iter_(\d+)", path.absolute().name)
        step = f" --ckpt-step {int(named[1])}" if named else ", in which it must be named iter_ and its iteration"
        return f"--load {path} is itself a checkpoint: give --load {path.parent}{step}."
    if found:
        return (
            f"--load {path} holds {found}: gptpar loads its own checkpoints only, {_remedy(path, found)}, and "
            f"nothing was written there. Give a folder that gptpar saved{otherwise}."
        )
    return None


def why_not_to_show(path: Path) -> str | None:
    """Why a verb that shows our checkpoints has nothing to show, and what to do; ``None``: nobody else's are there."""
    if not path.exists():
        return f"{path} does not exist: name a folder of checkpoints."
    if (found := foreign_checkpoint(path)) and not found.is_our_hint:  # a hint alone may be ours
        return f"{path} holds {found}: gptpar shows its own checkpoints only; {_remedy(path, found)}."
    return None


def _remedy(path: Path, found: Foreign) -> str:
    if found.reader is None:
        return f"this version has no command that converts it{found.their_way}"
    path /= found.inside
    begin = f" (a run begins with it by --load-hf {path})" if found.reader is ForeignReader.HUGGING_FACE else ""
    return f"gptpar convert {path} NEW_FOLDER makes one of it, or says what it cannot reproduce{begin}"


def why_not_to_save(path: str | Path, flag: str = "--save") -> str | None:
    """Why the folder of a flag must be left as it is; ``None``: nothing of somebody else's is there."""
    path = Path(path)
    if _is_ours(path):
        return f"{flag} {path} is itself a checkpoint: give {flag} {path.parent}, or another folder."
    if path.is_dir() and (found := foreign_checkpoint(path)):
        return f"{flag} {path} holds {found}: nothing is written into it; choose another folder."
    return None


def holds_ours(folder: str | Path) -> bool:
    """Whether a folder is, or holds, a checkpoint that gptpar saved, whole or damaged; in its branches, too."""
    folders = [Path(folder), *Path(folder).glob("branches/*")]
    return any(_is_ours(path) for each in folders for path in (each, *(found for _, found in find_checkpoints(each))))


def _is_ours(checkpoint: Path) -> bool:
    return (checkpoint / MANIFEST_NAME).is_file() or any(checkpoint.glob("rank?????.bin"))


def _entries(folder: Path) -> list[str]:
    """Names in a folder, those of folders with "/"; none where it cannot be read."""
    try:
        with os.scandir(folder) as found:
            return [entry.name + "/" * entry.is_dir() for entry in islice(found, MAX_ENTRIES)]
    except OSError:
        return []


def _named(title: str, names: list[str], *, certain: bool) -> Foreign | None:
    """The first format whose names are all there, with the title, or else the file, that shows it."""
    for known, wanted in ((one, names_of.split()) for one in _FORMATS for names_of in one.names):
        shown = [next((name for name in names if fnmatchcase(name, word)), None) for word in wanted]
        if all(shown) and (known.certain or not certain):
            what = printable(f"{known.what} ({title or shown[0]})".replace("/)", ")"))
            inside = title if known.reader is ForeignReader.HUGGING_FACE else ""
            is_file = not (title or known.certain)
            way = known.their_way and f" (a Hugging Face folder, which it reads, comes from {known.their_way})"
            return Foreign(what, known.reader, inside, their_way=way, is_file=is_file)
    return None


def _in_folders(path: Path, names: list[str]) -> Foreign | None:
    """The foreign checkpoint in a folder inside, newest first; two levels deep where a name is one of a checkpoint."""
    for name in _newest_first(names):
        like_one = _CHECKPOINT_NAME.fullmatch(name) is not None
        inside = _entries(path / name)
        if found := _named(name, inside, certain=not like_one):
            return found
        if like_one:
            deeper = (_named(f"{name}/{part}", _entries(path / name / part), certain=True) for part in _folders(inside))
            if found := next(filter(None, deeper), None):
                return found
        if re.fullmatch(r"global_step\d+.*", name):
            return Foreign(f"a DeepSpeed checkpoint ({name})", ForeignReader.MEGATRON)
    return None


def _pointer(path: Path, names: list[str]) -> Foreign | None:
    """A file that names a checkpoint which is not there."""
    for pointer in ("latest", "latest_universal"):
        if pointer in names and (tag := _first_line(path / pointer)).startswith("global_step"):
            return Foreign(f"a DeepSpeed checkpoint's file {pointer!r}, which names {tag!r}, without that folder")
    if HINT_NAME in names:
        named = _first_line(path / HINT_NAME)
        hint = f"{HINT_NAME}, which names {named!r}, without a checkpoint (delete that file if it is left over)"
        return Foreign(hint, is_our_hint=True)
    return None


def _first_line(path: Path) -> str:
    try:
        return read_regular(path, MAX_SMALL_BYTES)[:100].decode(errors="replace").partition("\n")[0].strip()
    except OSError:
        return ""


def _folders(names: list[str]) -> Iterator[str]:
    return (name.removesuffix("/") for name in names if name.endswith("/"))


def _newest_first(names: list[str]) -> list[str]:
    """Folders by the numbers in their names, the highest first."""
    return sorted(_folders(names), key=lambda name: [int(n) for n in re.findall(r"\d{1,18}", name)], reverse=True)
