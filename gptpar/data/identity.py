"""What tells a corpus from another one, wherever its files lie: kept in checkpoints, compared when a run goes on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptpar.data.blend import normalize, parse_data_path
from gptpar.data.indexed import DTYPES, HEADER, MAGIC

FINGERPRINT_BYTES = 1 << 16


def blend_of(data_path: Sequence[str]) -> list[dict[str, Any]]:
    """`prefix` and normalised `weight` of each corpus of a ``--data-path`` list; ``None`` in a blend without weights.

    Raises:
        DataError: an empty list, or weights that are none.
    """
    prefixes, weights = parse_data_path(data_path)
    shares = [None] * len(prefixes) if weights is None else normalize(weights).tolist()
    return [{"prefix": prefix, "weight": weight} for prefix, weight in zip(prefixes, shares, strict=True)]


def blend_identity(data_path: Sequence[str]) -> list[dict[str, Any]]:
    """`blend_of`, with what identifies each corpus: its prefix is for messages, since folders move.

    Raises:
        DataError: as `blend_of`.
        OSError: a file that cannot be read.
    """
    return [{**corpus, **corpus_identity(corpus["prefix"])} for corpus in blend_of(data_path)]


def corpus_identity(prefix: str) -> dict[str, Any]:
    """`sequences`, `tokens` and `sha256`, a hash of the first and last 64 KiB of both files; no time of change.

    The tokens count, too: corpora of documents of one length have equal indices. What is wrong with the files is told
    when they are opened for reading; here an index that is none counts as empty.
    """
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    digest = hashlib.sha256()
    for path in (index, tokens):
        size = path.stat().st_size
        with open(path, "rb") as file:
            digest.update(f"{size} ".encode() + file.read(FINGERPRINT_BYTES))
            file.seek(max(size - FINGERPRINT_BYTES, 0))
            digest.update(file.read(FINGERPRINT_BYTES))
    sequences, itemsize = _sequences_and_itemsize(index)
    return {"sequences": sequences, "tokens": os.stat(tokens).st_size // itemsize, "sha256": digest.hexdigest()}


def _sequences_and_itemsize(index: Path) -> tuple[int, int]:
    with open(index, "rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
        return 0, 1
    _, _, code, sequences, _ = HEADER.unpack(header)
    return sequences, np.dtype(DTYPES.get(code, "<u1")).itemsize
