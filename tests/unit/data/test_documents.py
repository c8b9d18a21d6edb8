"""What a few samples say of documents: their lengths, and the room that nearly every micro-batch needs."""

from pathlib import Path

import numpy as np
import pytest

from gptpar.data.documents import Documents, cumulative_lengths, lengths_in_corpora
from gptpar.errors import DataError
from tests.unit.data.corpora import write_corpus

EOD, LENGTH = 9, 64


def test_documents_of_samples() -> None:
    samples = np.array([[1, 9, 9, 2, 3, 9, 4], [9, 1, 2, 3, 4, 5, 9]])
    documents = Documents.of(samples, EOD, 1, False)
    assert documents.lengths == (2, 1, 3, 1, 5) and documents.mean_length == 12 / 5
    assert documents.room == 8  # 2.5 on average, and 4 deviations of 0.5
    whole = Documents.of(np.array([[1, 2, 3], [4, 5, 9]]), EOD, 4, True)
    assert whole.lengths == (2, 2) and whole.room == 0


@pytest.mark.parametrize(("size", "share"), [(1, 0.5), (4, 0.02), (4, 0.1)])
def test_hardly_a_micro_batch_has_more_documents_than_there_is_room_for(size: int, share: float) -> None:
    random = np.random.default_rng(0)
    ends = random.random((64 + 1000 * size, LENGTH)) < share
    room = Documents.of(np.where(ends[:64], EOD, 1), EOD, size, False).room
    counts = [len(cumulative_lengths(part, room)) for part in np.split(ends[64:], 1000)]
    assert np.mean(np.array(counts) > room + 1) < 0.005
    assert room <= 2.5 * size * (1 + LENGTH * share) + 8


def corpus(folder: Path, name: str, lengths: list[int]) -> str:
    write_corpus(folder / name, [[1] * length for length in lengths])
    return str(folder / name)


def test_lengths_in_a_corpus_are_cut_by_samples(tmp_path: Path) -> None:
    assert set(lengths_in_corpora([corpus(tmp_path, "equal", [16] * 5)], LENGTH)) == {16}
    assert set(lengths_in_corpora([corpus(tmp_path, "long", [10_000])], LENGTH)) <= {LENGTH, 10_000 % LENGTH, 48}
    with pytest.raises(DataError, match="there is no token"):
        lengths_in_corpora([corpus(tmp_path, "empty", [0])], LENGTH)
    uneven = lengths_in_corpora([corpus(tmp_path, "uneven", [24] * 7)], LENGTH)
    assert sum(uneven) == 64 * LENGTH and sum(uneven) / len(uneven) == pytest.approx(24 * 64 / (64 + 16), rel=0.01)


@pytest.mark.parametrize(("weights", "share"), [(None, 0.25), ((3, 1), 0.75)])
def test_corpora_count_by_their_weights_or_tokens(
    weights: tuple[int, int] | None, share: float, tmp_path: Path
) -> None:
    paths = corpus(tmp_path, "short", [8] * 100), corpus(tmp_path, "longer", [32] * 75)
    path = paths if weights is None else [str(weights[0]), paths[0], str(weights[1]), paths[1]]
    lengths = lengths_in_corpora(path, LENGTH)
    assert sum(one for one in lengths if one == 8) / sum(lengths) == share
