"""Corpora on the disk for tests."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from gptpar.data.indexed import IndexedDataset, IndexedDatasetWriter


def write_corpus(
    prefix: Path | str, documents: Iterable[Sequence[int] | np.ndarray], dtype: str = "int32"
) -> IndexedDataset:
    """One document after the other."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=np.int64))
    return IndexedDataset(prefix)
