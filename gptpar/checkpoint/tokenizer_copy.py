"""A checkpoint's copy of the tokenizer's files: written before the manifest, used only with the recorded SHA-256.

    root/iter_0000010/tokenizer/tokenizer.json, ...   the manifest's meta has the SHA-256 of each as ``tokenizer_files``

A stranger may have written the manifest and the links in the folder. So no name may leave it, and no link is followed.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptpar.errors import printable
from gptpar.system.files import read_regular, sync_directory, write_synced

FOLDER, KEY = "tokenizer", "tokenizer_files"
_PLAIN = re.compile(r"\w[\w.-]*", re.ASCII)


def with_digests(meta: dict[str, Any], files: Mapping[str, bytes] | None) -> dict[str, Any]:
    """A checkpoint's meta with the SHA-256 of each file of its copy."""
    return {**meta, KEY: {name: hashlib.sha256(files[name]).hexdigest() for name in files}} if files else meta


def write_copy(checkpoint: Path, files: Mapping[str, bytes] | None) -> None:
    """Put the files into a save in progress, and return when they are on the disk."""
    if files:
        (checkpoint / FOLDER).mkdir()
        for name, content in files.items():
            write_synced(checkpoint / FOLDER / name, content)
        sync_directory(checkpoint / FOLDER)


def damaged_copy(checkpoint: Path, meta: Mapping[str, Any]) -> list[str]:
    """A sentence for each file of the copy that is not as it was saved; none if no copy was saved."""
    recorded, folder = meta.get(KEY, {}), checkpoint / FOLDER
    if not isinstance(recorded, dict) or not all(map(_PLAIN.fullmatch, recorded)):
        return [f"the meta of {checkpoint} has tokenizer_files that are no plain file names"]
    there: list[str] = []
    with suppress(OSError):  # each file of it is reported below
        there = os.listdir(folder) if recorded else []
    problems = [f"{folder / printable(name)} was not saved with it" for name in sorted({*there} - {*recorded})]
    for name, digest in recorded.items():
        file = folder / name
        try:
            if os.path.realpath(file) != os.path.join(os.path.realpath(checkpoint), FOLDER, name):
                problems.append(f"{file} is a link, and none is followed")
            elif (found := hashlib.sha256(read_regular(file)).hexdigest()) != digest:
                problems.append(f"{file} has the SHA-256 {found}, and {printable(str(digest)[:64])} was saved")
        except OSError as error:
            problems.append(f"{file} cannot be read: {error.strerror}")
    return problems
