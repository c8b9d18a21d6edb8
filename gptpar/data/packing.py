"""Packs the documents of a corpus into samples of one length, by best fit, so that few documents are cut.

A document longer than a sample is cut into whole samples and a rest. Rests and shorter documents, the longest first,
each go into the fullest pack that has room (best-fit decreasing; Ding et al. 2024). Equal lengths are packed together,
so the work grows with the number of different lengths, not with the square of that of the documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from math import floor

import numpy as np

from gptpar.data.indexed import IndexedDataset, IndexedDatasetWriter
from gptpar.errors import DataError


@dataclass(frozen=True)
class PackSpec:
    """How a corpus is packed.

    Attributes:
        length: tokens of a pack: ``--seq-length`` of the training.
        long_from: tokens from which a document counts as long.
        upsample_long: how often a long document is packed; 2.5: in turn 2 and 3 times.
    """

    length: int
    long_from: int
    upsample_long: float = 1.0


def pack(prefix: str, output_prefix: str, spec: PackSpec, padding: int) -> str:
    """Write ``<output_prefix>.{bin,idx}``, whose sequences all have the length of a pack; returns a summary.

    The same corpus and numbers give the same files. Packs have the order that their longest pieces have in
    the corpus. So the training part and the validation part of a split both have packs of all kinds. Memory: about 100
    bytes a document.

    Args:
        prefix: prefix of the corpus's files.
        padding: the token that fills a pack's end: that of a document's end, which ``--eod-mask-loss`` does not learn.

    Raises:
        DataError: no document has a token.
    """
    corpus = IndexedDataset(prefix)
    lengths = corpus.lengths.astype(np.int64)
    taken = _copies(lengths, spec)
    if not len(taken):
        raise DataError(f"{prefix} has no document with a token, and there is nothing to pack")
    sources, offsets, sizes = _pieces(taken, lengths, spec.length)
    packs, leaders = best_fit(sizes, spec.length)
    rank = np.empty(len(leaders), np.int64)
    rank[np.lexsort((np.arange(len(leaders)), offsets[leaders], sources[leaders]))] = np.arange(len(leaders))
    order = np.lexsort((offsets, sources, rank[packs]))
    starts = corpus.offsets[sources[order]] // corpus.dtype.itemsize + offsets[order]
    stops = starts + sizes[order]
    ends = np.cumsum(np.bincount(rank[packs], minlength=len(leaders)))
    with IndexedDatasetWriter(output_prefix, corpus.dtype) as writer:
        first = 0
        for end in ends.tolist():
            tokens = np.full(spec.length, padding, corpus.dtype)
            pieces = [
                corpus.tokens[i:j] for i, j in zip(starts[first:end].tolist(), stops[first:end].tolist(), strict=True)
            ]
            np.concatenate(pieces, out=tokens[: sum(map(len, pieces))])
            writer.add_document(tokens)
            first = end
    return _summary(lengths, taken, sizes, len(leaders), spec, output_prefix)


def best_fit(sizes: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit decreasing: pieces, the longest first, each go into the pack with the least room that is enough.

    Among packs with equal room the oldest is taken, and among pieces of equal size the first goes first.

    Args:
        sizes: int64[N], each from 1 to ``length``.

    Returns:
        packs: int64[N], the pack of each piece.
        leaders: int64[P], the first piece of each pack, which is its longest.
    """
    order = np.argsort(-sizes, kind="stable")
    bounds = [0, *(np.flatnonzero(np.diff(sizes[order])) + 1).tolist(), len(order)]
    packs, opened = np.empty(len(sizes), np.int64), 0
    rooms: list[int] = []  # rising
    with_room: dict[int, list[np.ndarray]] = defaultdict(list)

    def keep(room: int, numbers: np.ndarray) -> None:
        if room and len(numbers):
            if room not in with_room:
                insort(rooms, room)
            with_room[room].append(numbers)

    for first, end in zip(bounds[:-1], bounds[1:], strict=True):
        size = int(sizes[order[first]])
        while first < end:
            if (at := bisect_left(rooms, size)) < len(rooms):
                room = rooms.pop(at)
                numbers = np.sort(np.concatenate(with_room.pop(room)))
            else:
                room, needed = length, -(-(end - first) // (length // size))
                numbers = np.arange(opened, opened + needed)
                opened += needed
            each = room // size
            whole = min(len(numbers), (end - first) // each)
            packs[order[first : first + whole * each]] = np.repeat(numbers[:whole], each)
            keep(room - each * size, numbers[:whole])
            first += whole * each
            if first < end and whole < len(numbers):  # the last pack takes the rest
                packs[order[first:end]] = numbers[whole]
                keep(room - (end - first) * size, numbers[whole : whole + 1])
                whole, first = whole + 1, end
            keep(room, numbers[whole:])
    leaders = np.empty(opened, np.int64)
    leaders[packs[order[::-1]]] = order[::-1]  # the first of each pack is written last
    return packs, leaders


def _copies(lengths: np.ndarray, spec: PackSpec) -> np.ndarray:
    """The document of each copy that is packed; copies of a document are apart, and empty documents have none."""
    counts = (lengths > 0).astype(np.int64)
    is_long = lengths >= max(1, spec.long_from)
    turns = np.array([floor(spec.upsample_long * turn) for turn in range(int(is_long.sum()) + 1)], np.int64)
    counts[is_long] = np.diff(turns)
    return np.concatenate([np.flatnonzero(counts > copy) for copy in range(int(counts.max(initial=0)))] or [counts[:0]])


def _pieces(taken: np.ndarray, lengths: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(document, offset in it, tokens) of each piece: whole packs of a document, and its rest."""
    numbers = -(-lengths[taken] // length)
    sources = np.repeat(taken, numbers)
    places = np.arange(len(sources)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    offsets = places * length
    return sources, offsets, np.minimum(lengths[sources] - offsets, length)


def _summary(
    lengths: np.ndarray, taken: np.ndarray, sizes: np.ndarray, packs: int, spec: PackSpec, output_prefix: str
) -> str:
    tokens, cut = int(sizes.sum()), int((lengths[taken] > spec.length).sum())
    again = len(taken) - int((lengths > 0).sum())
    upsampled = f", {again:,} of them again ({spec.upsample_long:g} x from {spec.long_from:,} tokens)" * (again != 0)
    return (
        f"packed {len(taken):,} documents{upsampled} into {packs:,} samples of {spec.length:,} tokens: "
        f"{100 * (1 - tokens / (packs * spec.length)):.2f} % padding, {cut:,} documents "
        f"({100 * cut / len(taken):.2f} %) cut\nwrote {output_prefix}.bin and .idx"
    )
