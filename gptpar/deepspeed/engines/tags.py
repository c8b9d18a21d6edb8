"""The tags of an engine's checkpoints (DeepSpeed's names of checkpoints), and finding a checkpoint by its tag.

    save_dir/iter_0000100/               a checkpoint (gptpar.checkpoint), which contains its tag
    save_dir/latest                      the tag that is loaded by default, as DeepSpeed writes it
    save_dir/TAG                         a link to the checkpoint, by which programs look for DeepSpeed's

A tag like iter_0000200 gets no link, which would count as a checkpoint of that number; a load finds its checkpoint.

A checkpoint's number is ``global_steps``, or the newest checkpoint's number plus one if that is larger. So the last
saved checkpoint has the highest number. Saving under an existing tag replaces that checkpoint, as in DeepSpeed, but
only after the new one has been verified.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from pathlib import Path

from gptpar.checkpoint import DamagedCheckpoint, find_checkpoints, read_manifest
from gptpar.checkpoint.folders import PUBLISHED
from gptpar.checkpoint.manifest import MANIFEST_NAME
from gptpar.checkpoint.ranks import Ranks
from gptpar.deepspeed.engines.stored_state import tag_of
from gptpar.errors import CheckpointError, DifferentTagsError
from gptpar.exchange import foreign_checkpoint
from gptpar.system.files import MAX_SMALL_BYTES, read_regular

LATEST = "latest"

Tagged = tuple[int, Path, str | None]
"""(number of a checkpoint, its path, its tag); the tag is ``None`` if the manifest is damaged or not an engine's."""


def agreed_tag(ranks: Ranks, tag: str, validation: str) -> str:
    """The tag that rank 0 gives a checkpoint.

    Args:
        validation: whether different tags of other ranks are an error (``fail``), a warning (``warn``), or neither.

    Raises:
        CheckpointError: the tag is no line of text.
        DifferentTagsError: it differs and must not.
    """
    tags = ranks.each(lambda: str(tag).strip())
    if len(set(tags)) > 1 and validation != "ignore":
        told = ", ".join(f"{one!r} on rank {tags.index(one)}" for one in dict.fromkeys(tags))
        told = f"the processes save one checkpoint under different tags: {told}"
        if validation == "fail":
            raise DifferentTagsError(f"{told}; give all the same, as checkpoint.tag_validation asks for.")
        if ranks.leads:
            warnings.warn(f"{told}. It is saved under rank 0's.", stacklevel=2)
    if not tags[0] or not tags[0].isprintable():
        raise CheckpointError(f"the tag {tags[0]!r} is no name: give a text of one line.")
    return tags[0]


def _tagged(folder: Path) -> list[Tagged]:
    """Every checkpoint of a folder, newest first."""
    found: list[Tagged] = []
    for number, path in find_checkpoints(folder):
        try:
            found.append((number, path, tag_of(read_manifest(path).meta)))
        except DamagedCheckpoint:
            found.append((number, path, None))
    return found


def link_tag(folder: Path, tag: str, checkpoint: Path) -> None:
    """Let ``folder/TAG`` lead to a checkpoint, unless that is a checkpoint's own name, or taken, or links fail."""
    link = folder / tag
    if link.parent != folder or tag == LATEST or PUBLISHED.fullmatch(tag):
        return
    with contextlib.suppress(OSError):
        if link.is_symlink():
            link.unlink()
        link.symlink_to(checkpoint.name, target_is_directory=True)


def place_for(folder: Path, tag: str, step: int) -> tuple[int, list[Path]]:
    """(number of a new checkpoint, paths of the checkpoints that it replaces)"""
    _require_own(folder, "nothing is written into it; choose another folder.", beside_files=True)
    found = _tagged(folder)
    for _, path, other in found:
        if other is None and _is_run(path):
            raise CheckpointError(f"{path} is of a run of gptpar pretrain: save in another folder than {folder}.")
    newest = found[0][0] if found else -1
    return max(step, newest + 1), [path for _, path, other in found if other == tag]


def _is_run(path: Path) -> bool:
    try:
        return tag_of(read_manifest(path).meta) is None
    except DamagedCheckpoint:
        return False


def _require_own(folder: Path, remedy: str, *, beside_files: bool = False) -> None:
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: give the folder of an engine's checkpoints.")
    found = foreign_checkpoint(folder) if folder.is_dir() else None
    if found and not (beside_files and found.lies_beside):
        raise CheckpointError(f"{folder} holds {found}: {remedy}")
    if (folder / MANIFEST_NAME).is_file() and re.fullmatch(r"iter_\d+", folder.name):
        raise CheckpointError(f"{folder} is itself a checkpoint: give {folder.parent}, the folder that it is in.")


def candidates(folder: Path, tag: str | None) -> list[tuple[int, Path]]:
    """(number, path) of the checkpoints that a load tries, in this order."""
    _require_own(folder, "the engine reads its own checkpoints only.")
    found = _tagged(folder)
    if tag is None:
        return _from_latest(found, _latest_tag(folder))
    chosen = [(number, path) for number, path, one in found if one == str(tag).strip()]
    if not chosen:
        names = ", ".join(repr(one) for *_, one in found if one is not None) or "none"
        damaged = [str(path) for *_, path, one in found if one is None]
        unknown = f"; of {', '.join(damaged)} it cannot be read" if damaged else ""
        raise CheckpointError(f"{folder} has no checkpoint of the tag {str(tag)!r}; it has {names}{unknown}.")
    return chosen


def _from_latest(found: list[Tagged], latest: str | None) -> list[tuple[int, Path]]:
    """The checkpoint with the latest tag and those before it; all checkpoints if none has that tag."""
    numbers = [number for number, _, tag in found if tag is not None and tag == latest]
    return [(number, path) for number, path, _ in found if not numbers or number <= numbers[0]]


def _latest_tag(folder: Path) -> str | None:
    try:
        return read_regular(folder / LATEST, MAX_SMALL_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
