"""Identifies a corpus wherever its files are: checkpoints keep this identity, and a resumed run compares it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptpar.data.blend import normalize, parse_data_path
from gptpar.data.index_cache import file_and_ends
from gptpar.data.indexed import DTYPES, HEADER, MAGIC
from gptpar.system.files import open_regular


def blend_of(data_path: Sequence[str]) -> list[dict[str, Any]]:
    """``prefix`` and normalised ``weight`` of each corpus of a ``--data-path`` list; ``None`` in one without weights.

    Raises:
        DataError: see ``parse_data_path``.
    """
    prefixes, weights = parse_data_path(data_path)
    fractions = [None] * len(prefixes) if weights is None else normalize(weights).tolist()
    return [{"prefix": prefix, "weight": weight} for prefix, weight in zip(prefixes, fractions, strict=True)]


def blend_identity(data_path: Sequence[str]) -> list[dict[str, Any]]:
    """``blend_of`` with each corpus's identity; its prefix is for messages alone, because folders move.

    Raises:
        DataError: see ``blend_of``.
        OSError: a file cannot be read.
    """
    return [{**corpus, **corpus_identity(corpus["prefix"])} for corpus in blend_of(data_path)]


def corpus_identity(prefix: str) -> dict[str, Any]:
    """``sequences``, ``tokens``, and ``sha256``: a hash of both files' first and last 64 KiB, without times of change.

    The tokens count, too, because corpora whose documents are equally long have equal indices. Damaged files are
    reported when they are opened for reading; here a file that is no index counts as empty.
    """
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    digest = hashlib.sha256()
    for path in (index, tokens):
        status, ends = file_and_ends(path)
        digest.update(f"{status.st_size} ".encode() + ends)
    sequences, itemsize = _sequences_and_itemsize(index)
    return {"sequences": sequences, "tokens": os.stat(tokens).st_size // itemsize, "sha256": digest.hexdigest()}


def _sequences_and_itemsize(index: Path) -> tuple[int, int]:
    with open_regular(index) as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
        return 0, 1
    _, _, code, sequences, _ = HEADER.unpack(header)
    return sequences, np.dtype(DTYPES.get(code, "<u1")).itemsize
