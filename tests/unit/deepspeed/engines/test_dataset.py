"""``training_data`` as micro-batches."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from gptpar.adapter.options import EngineOptions, read_options
from gptpar.deepspeed.engines.dataset import RepeatingLoader, make_loader
from gptpar.errors import GptparError


def numbers(count: int) -> Any:
    return list(range(count))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


def options(world: int, micro: int, train: int = 12, seed: int = 5, **keys: Any) -> EngineOptions:
    sizes = {"train_batch_size": train, "train_micro_batch_size_per_gpu": micro}
    return read_options({**sizes, **keys, "gptpar": {"seed": seed}}, world=world)


def steps(world: int, micro: int, count: int, seed: int = 5) -> list[list[int]]:
    """The samples of each step, sorted: all processes' micro-batches together."""
    found: list[list[int]] = [[] for _ in range(count)]
    chosen = options(world, micro, seed=seed)
    for rank in range(world):
        batches = RepeatingLoader(make_loader(numbers(40), chosen, rank, world))
        for samples in found:
            for batch in islice(batches, chosen.batch.accumulation_steps):
                assert batch.shape == (micro,)
                samples += batch.tolist()
    return [sorted(samples) for samples in found]


def test_a_step_has_the_same_samples_on_any_number_of_processes() -> None:
    expected = steps(1, 12, 3)
    assert sum(map(len, expected)) == len({sample for step in expected for sample in step}) == 36
    for world, micro in ((1, 4), (2, 3), (4, 1), (3, 4)):
        assert steps(world, micro, 3) == expected
    assert steps(1, 12, 3, seed=6) != expected


def test_each_epoch_has_another_order_and_another_rest() -> None:
    """As with torch's loader; on all processes alike, and as the engine's own epochs are ordered."""
    loaders = [make_loader(numbers(10), options(2, 2, 4), rank, 2) for rank in range(2)]
    epochs = [[torch.cat(list(loader)).tolist() for loader in loaders] for _ in range(6)]
    together = [sorted(first + second) for first, second in epochs]
    assert all(len(set(samples)) == 8 for samples in together)
    assert {sample for samples in together for sample in samples} == set(range(10))
    assert len({tuple(first) for first, _ in epochs}) == 6
    batches = RepeatingLoader(make_loader(numbers(10), options(2, 2, 4), 0, 2))
    assert [torch.cat([next(batches), next(batches)]).tolist() for _ in range(6)] == [first for first, _ in epochs]
    assert batches.epoch == 5


def test_a_rest_is_left_out_and_samples_are_collated_as_asked() -> None:
    loader = make_loader(numbers(11), options(2, 2, 4), 1, 2, lambda samples: {"sum": sum(samples)})
    assert len(loader) == 2 and [list(batch) for batch in loader] == [["sum"]] * 2
    stream = make_loader(Stream(), options(1, 3, 3), 0, 1)
    assert [batch.tolist() for batch in stream] == [[0, 1, 2], [3, 4, 5]]


def test_a_rest_makes_a_smaller_micro_batch_if_the_configuration_keeps_it() -> None:
    """As with DeepSpeed's false: two processes get 6 of 11 samples each, and one sample comes twice."""
    chosen = options(2, 4, 8, dataloader_drop_last=False)
    epochs = [[batch.tolist() for batch in make_loader(numbers(11), chosen, rank, 2)] for rank in range(2)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 2]] * 2
    samples = sorted(sample for epoch in epochs for batch in epoch for sample in batch)
    assert len(samples) == 12 and set(samples) == set(range(11))
    assert [len(batch) for batch in make_loader(numbers(1), chosen, 1, 2)] == [1]
    stream = make_loader(Stream(), options(1, 3, 3, dataloader_drop_last=False), 0, 1)
    assert [batch.tolist() for batch in stream] == [[0, 1, 2], [3, 4, 5], [6]]


def test_data_that_cannot_be_divided() -> None:
    told = r"has 7 samples, fewer than one micro-batch of 4 on each of 2 process\(es\): .*lower train_micro_batch"
    with pytest.raises(GptparError, match=told):
        make_loader(numbers(7), options(2, 4, 8), 0, 2)
    with pytest.raises(GptparError, match="^training_data is an IterableDataset, which 2 processes would each read"):
        make_loader(Stream(), options(2, 4, 8), 0, 2)
    with pytest.raises(GptparError, match="^the data loader has no batch"):
        next(RepeatingLoader[int]([]))
