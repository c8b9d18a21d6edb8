"""Micro-batches: masks and positions by hand, the cut over ranks, reading ahead and its errors."""

import threading

import numpy as np
import pytest
import torch

from gptpar.data.loader import BatchLoader, MicroBatch, make_micro_batch
from gptpar.data.order import WholeOrder, make_order
from gptpar.errors import DataError

EOD = 9


class Counting:
    """Sample i holds i * 10, i * 10 + 1, ...; remembers which thread read what."""

    def __init__(self, size: int = 48, seq_length: int = 4):
        self.size, self.seq_length = size, seq_length
        self.reads: list[tuple[int, bool]] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> np.ndarray:
        self.reads.append((index, threading.current_thread() is threading.main_thread()))
        return np.arange(index * 10, index * 10 + self.seq_length + 1)

    def describe(self, index: int) -> str:
        return f"sample {index} of /data/corpus (train)"


def loader(dataset: Counting, **options: object) -> BatchLoader:
    settings: dict = {"order": make_order("single", len(dataset)), "micro_batch_size": 2, "num_workers": 1} | options
    return BatchLoader(dataset, **settings)


def rows(batches: list[MicroBatch]) -> list[list[int]]:
    """First token of each sample over ten: its index, per micro-batch."""
    return [(batch.tokens_BS[:, 0] // 10).tolist() for batch in batches]


def test_tokens_and_labels_without_masks_and_with_padding_that_does_not_count() -> None:
    batch = make_micro_batch(np.array([[1, 9, 3, 4], [5, 6, 7, 8]]))
    assert batch.tokens_BS.tolist() == [[1, 9, 3], [5, 6, 7]]
    assert batch.labels_BS.tolist() == [[9, 3, 4], [6, 7, 8]]
    assert batch.tokens_BS.dtype == batch.labels_BS.dtype == torch.int64
    assert batch.loss_mask_BS is None and batch.position_ids_BS is None and batch.cu_seqlens is None
    batch = make_micro_batch(np.array([[1, 2, 3, -1], [4, 5, -1, -1]]))
    assert batch.tokens_BS.tolist() == [[1, 2, 3], [4, 5, 0]]
    assert batch.labels_BS.tolist() == [[2, 3, 0], [5, 0, 0]]
    assert batch.loss_mask_BS.tolist() == [[1, 1, 0], [1, 0, 0]] and batch.loss_mask_BS.dtype == torch.float32


def test_document_ends() -> None:
    samples = np.array([[1, 9, 9, 2, 3, 9, 4], [9, 1, 2, 3, 4, 5, 9]])
    batch = make_micro_batch(samples, eod=EOD, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    assert batch.position_ids_BS.tolist() == [[0, 1, 0, 0, 1, 2], [0, 0, 1, 2, 3, 4]]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6, 7, 12, 12, 12, 12]  # 5 documents, room for 8
    assert batch.loss_mask_BS.tolist() == [[1, 0, 0, 1, 1, 0], [0, 1, 1, 1, 1, 1]]
    assert batch.position_ids_BS.dtype == torch.int64 and batch.cu_seqlens.dtype == torch.int32


def test_all_micro_batches_of_a_run_have_the_same_tensors() -> None:
    """Whether or not a document ends in them; else a recorded step would not fit them."""
    rules = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}
    reader = loader(Counting(40, 20), eod=25, **rules)  # samples 1 and 2 have an end
    whole, cut = reader.fetch(8, 2)[0], reader.fetch(0, 2)[0]
    assert reader.documents is not None and reader.documents.room == 4
    assert whole.cu_seqlens.tolist() == [0, 20, 40, 40, 40] and cut.cu_seqlens.tolist() == [0, 20, 36, 40, 40]
    assert whole.loss_mask_BS.sum() == 40 and cut.loss_mask_BS.sum() == 39
    reader.close()


@pytest.mark.parametrize(
    ("samples", "room", "starts"),
    [
        ([[EOD] * 9] * 2, 8, [*range(17)]),  # more documents than there is room for
        ([[EOD] * 4 + [1] * 5], 3, [0, 1, 2, 3, 4, 8, 8, 8, 8]),
        ([[1, 2, 3, 4], [5, 6, 7, EOD]], None, None),  # whole samples, where ends are rare: this one is a label alone
        ([[1, 2, 3, 4], [5, 6, 7, EOD]], 8, [0, 3, *[6] * 7]),
    ],
)
def test_documents_are_exact_whatever_room_there_is(
    samples: list[list[int]], room: int | None, starts: list[int] | None
) -> None:
    more = {} if room is None else {"room": room}
    found = make_micro_batch(np.array(samples), eod=EOD, reset_attention_mask=True, **more).cu_seqlens
    assert (found if found is None else found.tolist()) == starts


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_each_rank_gets_its_micro_batches(num_workers: int) -> None:
    per_rank = []
    for rank in range(2):
        reader = loader(Counting(), dp_rank=rank, dp_size=2, num_workers=num_workers)
        per_rank.append([rows(reader.fetch(consumed, 12)) for consumed in (0, 12, 24)])
        reader.close()
    assert per_rank[0] == [[[0, 1], [4, 5], [8, 9]], [[12, 13], [16, 17], [20, 21]], [[24, 25], [28, 29], [32, 33]]]
    assert per_rank[1][0] == [[2, 3], [6, 7], [10, 11]]


@pytest.mark.parametrize("size", [10, 12, 13])
def test_a_whole_data_set_is_read_once_and_its_last_batch_filled(size: int) -> None:
    counted, shapes = [], []
    for rank in range(2):
        reader = loader(Counting(size), order=WholeOrder(size), dp_rank=rank, dp_size=2)
        for place in reader.whole(8):
            for batch in reader.fetch(*place):
                mask = torch.ones(2, 4) if batch.loss_mask_BS is None else batch.loss_mask_BS
                counted += (batch.tokens_BS[mask[:, 0] > 0, 0] // 10).tolist()
                shapes.append(batch.tokens_BS.shape)
                assert mask.sum() == batch.num_counted and batch.tokens_BS.min() >= 0
        reader.close()
    assert sorted(counted) == list(range(size))
    assert set(shapes) == {(2, 4)} and reader.whole(8) == [(0, 8), (8, 4 if size <= 12 else 8)]


def test_fetch_depends_on_its_arguments_alone() -> None:
    reader = loader(Counting())
    expected = {(0, 4): [[0, 1], [2, 3]], (8, 8): [[8, 9], [10, 11], [12, 13], [14, 15]], (4, 2): [[4, 5]]}
    for arguments in [(0, 4), (8, 8), (4, 2), (0, 4), (0, 4), (8, 8)]:  # a growing batch, a jump back, a repeat
        assert rows(reader.fetch(*arguments)) == expected[arguments]
    reader.close()


def test_the_next_batch_is_read_ahead_by_another_thread() -> None:
    dataset = Counting()
    reader = loader(dataset)
    reader.fetch(0, 4)
    for future in reader._ahead[1]:
        future.result()
    reads = [index for index, _ in dataset.reads[-8:]]
    assert reads == list(range(8)) and not any(in_main for _, in_main in dataset.reads[-8:])
    reader.fetch(4, 4)
    reader.close()
    assert [index for index, _ in dataset.reads].count(5) == 1


def test_the_last_batch_is_not_spoiled_by_reading_ahead() -> None:
    reader = loader(Counting(8))
    assert rows(reader.fetch(4, 4)) == [[4, 5], [6, 7]]
    with pytest.raises(DataError, match="samples 8 to 9 are needed, but the data set has 8"):
        reader.fetch(8, 4)
    assert rows(reader.fetch(0, 4)) == [[0, 1], [2, 3]]
    reader.close()


def test_ids_outside_the_vocabulary_are_named_at_the_start_or_when_they_are_read() -> None:
    class Rare(Counting):
        def __getitem__(self, index: int) -> np.ndarray:
            return np.array([1, 2, 3, 4, {5: 999, 8: -7, 47: 9}.get(index, 0)])

    told = r"sample 47 of /data/corpus \(train\) holds token id 9 at place 4, outside the vocabulary of 9; .* tokenizer"
    with pytest.raises(DataError, match=told):
        loader(Rare(), vocab_size=9)  # the check at the start sees the last sample
    reader = loader(Rare(), vocab_size=10)
    reader.fetch(0, 4)
    with pytest.raises(DataError, match=r"sample 5 of /data/corpus \(train\) holds token id 999"):
        reader.fetch(4, 4)
    with pytest.raises(DataError, match="sample 8 .* holds token id -7"):
        reader.fetch(8, 4)
    reader.close()
