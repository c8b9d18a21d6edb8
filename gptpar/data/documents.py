"""``Documents``: where documents start in a micro-batch, and what a few samples say of their lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gptpar.data.blend import normalize, parse_data_path
from gptpar.data.indexed import IndexedDataset
from gptpar.errors import DataError

NUM_SAMPLES = 64
"""Number of samples that are read to estimate a corpus's documents."""
DEVIATIONS, ROOM_STEP = 4, 4
"""Standard deviations from the mean number of documents for which there is room, and the number it is a multiple of."""


def follow_ends(ends_BS: np.ndarray) -> np.ndarray:
    """Whether the token before is an end of document; it is not for a sample's first."""
    follows_end = np.zeros_like(ends_BS)
    follows_end[:, 1:] = ends_BS[:, :-1]
    return follows_end


def document_starts(ends_BS: np.ndarray, joins_ends: bool) -> np.ndarray:
    """Whether a document, as attention takes it, starts at a token behind a sample's first.

    Args:
        joins_ends: whether end-of-document tokens that follow another one, such as a pack's padding, become one
            document. No other token sees them. With ``--eod-mask-loss`` they do not count, so no loss changes.
    """
    starts_BS = follow_ends(ends_BS)
    empty_BS = ends_BS & starts_BS
    return starts_BS & ~(empty_BS & follow_ends(empty_BS)) if joins_ends else starts_BS


def cumulative_lengths(starts_BS: np.ndarray, room: int = 0) -> np.ndarray | None:
    """``cu_seqlens`` of a :class:`~gptpar.data.loader.MicroBatch`, as kernels for variable lengths take it.

    Its length changes as rarely as possible: a recorded step takes one length only.

    Args:
        starts_BS: whether a token is the first of its document; first tokens of samples are in any case.
        room: number of documents for which there is room, if there are not more. 0: where each sample is one document,
            there is no ``cu_seqlens``, because attention to whole samples has the faster kernel.
    """
    starts_BS = starts_BS.copy()
    starts_BS[:, 0] = True
    (places,) = np.nonzero(starts_BS.reshape(-1))
    if not room and len(places) == len(starts_BS):
        return None
    if len(places) > room:
        room = 1 << (len(places) - 1).bit_length()
    return np.pad(places, (0, room + 1 - len(places)), constant_values=starts_BS.size).astype(np.int32)


@dataclass(frozen=True)
class Documents:
    """What a few samples say of the documents that samples are cut from.

    Attributes:
        lengths: lengths of documents as tokens see them, within their samples.
        room: documents for which a micro-batch has room, see :func:`cumulative_lengths`; hardly any has more.
    """

    lengths: tuple[int, ...]
    room: int

    @classmethod
    def of(cls, samples_BT: np.ndarray, eod: int | None, micro_batch_size: int, joins_ends: bool) -> Documents:
        """The documents of a few samples [B, S + 1]; for ``joins_ends`` see :func:`document_starts`."""
        starts_BS = document_starts(samples_BT[:, :-1] == eod, joins_ends)
        starts_BS[:, 0] = True
        places = np.append(np.flatnonzero(starts_BS), starts_BS.size)
        counts_B = starts_BS.sum(axis=1)
        lengths = tuple(np.diff(places).tolist())
        if counts_B.max() == 1:
            return cls(lengths, 0)
        most = micro_batch_size * counts_B.mean() + DEVIATIONS * (micro_batch_size * counts_B.var()) ** 0.5
        return cls(lengths, ROOM_STEP * math.ceil(most / ROOM_STEP))

    @property
    def mean_length(self) -> float:
        """Tokens of a document."""
        return sum(self.lengths) / len(self.lengths)


def lengths_in_corpora(data_path: Sequence[str], seq_length: int) -> tuple[int, ...]:
    """Lengths of documents as tokens see them, in a few samples cut from documents that are drawn from the corpora.

    Args:
        data_path: the words of ``--data-path``; a corpus of a blend has its weight, or without weights its tokens.
        seq_length: S.

    Raises:
        DataError: the corpora cannot be opened, or have no token.
    """
    prefixes, weights = parse_data_path(data_path)
    corpora = [IndexedDataset(prefix).lengths for prefix in prefixes]
    if not any(lengths.any() for lengths in corpora):
        raise DataError(f"{', '.join(map(str, prefixes))}: there is no token, and so no sample.")
    random, found = np.random.default_rng(0), []
    for share, lengths in zip(normalize(weights or [c.sum(dtype=np.int64) for c in corpora]), corpora, strict=True):
        end = math.ceil(share * NUM_SAMPLES) * seq_length
        drawn = lengths[random.integers(len(lengths), size=end if len(lengths) else 0)]
        starts = np.cumsum(drawn[drawn > 0], dtype=np.int64)
        cuts = np.union1d(starts[starts < end], np.arange(0, end + 1, seq_length))
        found.append(np.diff(cuts))
    return tuple(np.concatenate(found).tolist())
