"""Cuts a corpus into samples of fixed length, in exactly the order of Megatron's GPTDataset.

The split's sequences are repeated for as many epochs as the samples need, shuffled, and laid end to end. Sample k
consists of the tokens [k S, k S + S + extra) of that line. A second shuffle gives the order in which samples are read.
Megatron stores a (document, offset) pair for each sample. Here only the token count of each block of documents is
stored, and a pair is computed when it is needed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gptpar.data.index_cache import Arrays, IndexCache, Shapes, Store, file_identity
from gptpar.data.indexed import IndexedDataset, negative_token
from gptpar.data.kernels import shuffle_in_place
from gptpar.data.splits import SequenceRange
from gptpar.errors import DataError

PAD = -1
"""The token id of padding behind the corpus's end."""
BLOCK = 256  # documents per stored token count
SCAN_BLOCKS = 4096  # blocks summed together, which bounds the memory of that pass
MIN_CACHED_ENTRIES = 4_000_000  # smaller indices are built faster than a file is found
ARRAYS = ("documents", "block_starts", "shuffle")
"""Names of the arrays of :func:`build_index`."""
CACHE_FORMAT = 2
"""Version of the cached arrays; another one is not read."""


@dataclass(frozen=True)
class IndexPlan:
    """How often a split is repeated, and how many samples that gives.

    Attributes:
        num_sequences: number of the split's sequences.
        tokens_per_epoch: number of the split's tokens.
        seq_length: S.
        extra: 1 if a sample's last label is the following token, 0 if samples do not overlap.
        num_epochs: number of repetitions.
        num_samples: samples in all epochs, at least as many as the run will read.
        separate_last: whether the last, partly used epoch is shuffled by itself.
        num_shuffled_first: samples shuffled among themselves before the rest; equal to num_samples unless
            separate_last.
    """

    num_sequences: int
    tokens_per_epoch: int
    seq_length: int
    extra: int
    num_epochs: int
    num_samples: int
    separate_last: bool
    num_shuffled_first: int

    @property
    def num_tokens(self) -> int:
        return self.num_epochs * self.tokens_per_epoch


def plan_index(
    num_sequences: int, tokens_per_epoch: int, requested: int | None, seq_length: int, extra: int
) -> IndexPlan:
    """Megatron's arithmetic.

    Args:
        requested: number of samples that the run will read; None: one epoch.
    """
    needed = (requested or 0) * seq_length + extra
    num_epochs = 1 if requested is None else max(1, -(-needed // tokens_per_epoch))
    usable = num_epochs * tokens_per_epoch - extra
    num_samples = usable // seq_length
    separate_last, first = False, num_samples
    if num_epochs > 1 and requested is not None:
        before_last = (usable - tokens_per_epoch) // seq_length
        per_epoch = (tokens_per_epoch - extra) // seq_length
        separate_last = requested - before_last < int(0.80 * per_epoch)
        first = before_last if separate_last else num_samples
    return IndexPlan(num_sequences, tokens_per_epoch, seq_length, extra, num_epochs, num_samples, separate_last, first)


def index_shapes(plan: IndexPlan) -> Shapes:
    """Name -> (length, dtype) of each array of build_index."""
    num_documents = plan.num_epochs * plan.num_sequences
    return {
        "documents": (num_documents, np.min_scalar_type(plan.num_sequences - 1)),
        "block_starts": (-(-num_documents // BLOCK) + 1, np.dtype(np.int64)),
        "shuffle": (plan.num_samples, np.dtype(np.uint32 if plan.num_samples < 2**32 - 2 else np.int64)),
    }


def build_index(plan: IndexPlan, lengths: np.ndarray, seed: int, store: Store) -> Arrays:
    """The three arrays from which a split's samples are found.

    Args:
        lengths: int32[num_sequences], tokens of each sequence.
        seed: seed of both shuffles.
        store: takes each array's name and values, and returns what to use instead (a mapped file).

    Returns:
        documents: the order of the sequences, [num_epochs * num_sequences] in the narrowest unsigned dtype.
        block_starts: int64, tokens before each block of BLOCK documents, and the total.
        shuffle: uint32[num_samples] (int64 from 2**32 - 2 on), the sample read at each place.
    """
    random = np.random.RandomState(seed)
    dtypes = {name: dtype for name, (_, dtype) in index_shapes(plan).items()}
    documents = np.tile(np.arange(plan.num_sequences, dtype=dtypes["documents"]), plan.num_epochs)
    cut = len(documents) - plan.num_sequences if plan.separate_last else len(documents)
    shuffle_in_place(documents[:cut], random)
    shuffle_in_place(documents[cut:], random)
    starts = store("block_starts", _block_starts(documents, lengths))
    documents = store("documents", documents)
    shuffle = np.arange(plan.num_samples, dtype=dtypes["shuffle"])
    shuffle_in_place(shuffle[: plan.num_shuffled_first], random)
    shuffle_in_place(shuffle[plan.num_shuffled_first :], random)
    return {"documents": documents, "block_starts": starts, "shuffle": store("shuffle", shuffle)}


def _block_starts(documents: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    sums = [np.zeros(1, np.int64)]
    for i in range(0, len(documents), SCAN_BLOCKS * BLOCK):
        tokens = lengths[documents[i : i + SCAN_BLOCKS * BLOCK]]
        sums.append(np.add.reduceat(tokens, np.arange(0, len(tokens), BLOCK), dtype=np.int64))
    return np.cumsum(np.concatenate(sums))


class GPTDataset:
    """Samples of one range of sequences of a corpus.

    Args:
        indexed: the corpus.
        sequence_range: [start, end) from parse_split.
        num_samples: samples the run will read; None for one epoch.
        seq_length: S, tokens the model sees.
        seed: the run's seed, the same for every split and every corpus.
        add_extra_token: 1 if a sample's last label is the following token, 0 if samples do not overlap.
        split_name: the split's name in messages.
        cache_dir: folder of the index cache, used from about 4 million entries on; None: ``cache`` beside the
            corpus.

    Raises:
        DataError: samples are needed, but the range holds no tokens, or too few for one sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        sequence_range: SequenceRange,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        *,
        add_extra_token: int = 1,
        split_name: str = "train",
        cache_dir: str | Path | None = None,
    ):
        self.indexed, self.split_name, self.seq_length = indexed, split_name, seq_length
        self._start, end = sequence_range
        self._lengths = indexed.lengths[self._start : end]
        num_tokens = int(self._lengths.sum(dtype=np.int64))
        if num_tokens == 0 and num_samples != 0:
            raise DataError(
                f"{self._name()}: {num_samples or 'some'} samples are asked for, but its sequences [{self._start}, "
                f"{end}) of {len(indexed):,} hold no token; change --split, use a larger corpus, or "
                "turn evaluation off with --eval-iters 0"
            )
        self.plan = plan_index(len(self._lengths), max(num_tokens, 1), num_samples, seq_length, add_extra_token)
        if self.plan.num_samples < 1 and num_samples != 0:
            raise DataError(
                f"{self._name()}: one sample takes {seq_length} + {add_extra_token} tokens, but its "
                f"{len(self._lengths):,} sequences hold only {num_tokens:,}; use a larger corpus or split, or a "
                "shorter sequence"
            )
        self._signed = indexed.dtype.kind == "i"
        arrays = self._arrays(seed, cache_dir) if num_tokens else dict.fromkeys(ARRAYS, np.zeros(0, np.int64))
        self._documents, self._block_starts, self._shuffle = (arrays[name] for name in ARRAYS)

    def __len__(self) -> int:
        return len(self._shuffle)

    def __getitem__(self, index: int) -> np.ndarray:
        """int64[S + 1] tokens of one sample; PAD (-1) where the corpus ends or there is no extra token.

        Raises:
            DataError: the corpus holds a negative number; PAD is always padding of this data set.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self._name()}: sample {index} of {len(self):,}")
        self.indexed.require_whole_index()
        sample = int(self._shuffle[index])
        first, offset = self.boundary(sample)
        last, end = self.boundary(sample + 1)
        sequences = self._start + self._documents[first : last + 1].astype(np.int64)
        starts = self.indexed.offsets[sequences] // self.indexed.dtype.itemsize
        stops = starts + self.indexed.lengths[sequences]
        stops[-1] = starts[-1] + end + self.plan.extra
        starts[0] += offset
        pieces = [self.indexed.tokens[i:j] for i, j in zip(starts.tolist(), stops.tolist(), strict=True)]
        tokens = np.full(self.seq_length + 1, PAD, np.int64)
        read = tokens[: int((stops - starts).sum())]
        np.concatenate(pieces, out=read)
        if self._signed and read.min() < 0:
            place = int(read.argmin())
            raise negative_token(f"{self.describe(index)}: token {place}", int(read[place]))
        return tokens

    def boundary(self, sample: int) -> tuple[int, int]:
        """Row ``sample`` of Megatron's sample index: (place among the shuffled documents, offset in that document).

        A boundary lies in the document that holds the last token of the sample before, its extra token included.
        """
        if sample == 0:
            return 0, 0
        extra = self.plan.extra
        token = min(sample * self.seq_length, self.plan.num_tokens - extra)
        block = int(np.searchsorted(self._block_starts, token + extra - 1, side="right")) - 1
        lengths = self._lengths[self._documents[block * BLOCK : (block + 1) * BLOCK]]
        ends = np.cumsum(lengths, dtype=np.int64) + self._block_starts[block]
        place = int(np.searchsorted(ends, token + extra - 1, side="right"))
        return block * BLOCK + place, token - int(ends[place] - lengths[place])

    def describe(self, index: int) -> str:
        """The origin of a sample, for messages."""
        return f"sample {index} of {self._name()}"

    def _name(self) -> str:
        return f"{self.indexed.prefix} ({self.split_name})"

    def _arrays(self, seed: int, cache_dir: str | Path | None) -> Arrays:
        if self.plan.num_epochs * self.plan.num_sequences + self.plan.num_samples < MIN_CACHED_ENTRIES:
            return build_index(self.plan, self._lengths, seed, lambda _, values: values)
        folder = Path(cache_dir) if cache_dir is not None else Path(self.indexed.prefix).parent / "cache"
        identity: dict[str, Any] = {
            "format": CACHE_FORMAT,
            "block": BLOCK,
            "corpus": file_identity(self.indexed.idx_path),
            "start": self._start,
            "seed": seed,
            "plan": asdict(self.plan),
        }
        return IndexCache(folder).get(
            identity, lambda store: build_index(self.plan, self._lengths, seed, store), index_shapes(self.plan)
        )
