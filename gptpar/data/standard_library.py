"""Makes a corpus of this Python's own standard library.

It needs no download and no licence, takes a few seconds, and is large enough to train and check a small model.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

from gptpar.errors import DataError
from gptpar.system.files import atomic_output

SUFFIXES = (".py", ".rst", ".txt")
# Installed packages differ between machines, and some distributions strip the tests.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
TOPICS = "pydoc_data/topics.py"
"""A file whose text is a dictionary of the language's documentation."""
MIN_BYTES = 1_000_000
"""Bytes that a library must have to be a corpus."""
SHUFFLE_SEED = 1234


def standard_library_documents(root: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of each source file, text file and documentation topic under ``root``, sorted by name.

    Files that are not UTF-8 are skipped.
    """
    names = (p.relative_to(root) for p in root.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    for name in sorted(n.as_posix() for n in names if not SKIPPED_FOLDERS & set(n.parts)):
        try:
            text = (root / name).read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if name == TOPICS:
            yield from ((f"{name}#{topic}", page) for topic, page in _topics(text))
        else:
            yield name, text


def _topics(source: str) -> Iterator[tuple[str, str]]:
    """The pages of ``help()``: the one dict literal of pydoc's topics module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            yield from sorted(ast.literal_eval(node).items())
            return


def make_corpus(output: str, root: Path, max_bytes: int | None = None) -> str:
    """Write {"text", "source"} lines, without duplicates, in a fixed shuffled order; returns a summary.

    Args:
        root: folder of the standard library.
        output: path of the file.
        max_bytes: limit of the text, in UTF-8 bytes; documents that would exceed it are left out.

    Raises:
        DataError: fewer than MIN_BYTES are found.
    """
    unique: dict[bytes, tuple[str, str]] = {}
    for name, text in standard_library_documents(root):
        if text.strip():
            unique.setdefault(hashlib.sha256(text.encode()).digest(), (name, text))
    found = sum(len(text.encode()) for _, text in unique.values())
    if found < MIN_BYTES:
        raise DataError(
            f"the standard library at {root} holds {found:,} bytes of readable source, at least "
            f"{MIN_BYTES:,} are needed (it may be zipped or stripped); "
            "use another Python, or a corpus of your own"
        )
    documents = list(unique.values())
    random.Random(SHUFFLE_SEED).shuffle(documents)
    num_documents = num_bytes = 0
    with atomic_output(output) as file:
        for name, text in documents:
            size = len(text.encode())
            if max_bytes is not None and num_bytes + size > max_bytes:
                continue
            file.write(json.dumps({"text": text, "source": name}, ensure_ascii=False).encode() + b"\n")
            num_documents, num_bytes = num_documents + 1, num_bytes + size
        if not num_documents:
            raise DataError(f"each document is larger than {max_bytes:,} bytes")
    return f"wrote {num_documents:,} documents, {num_bytes:,} bytes of text, from {root} to {output}"
