"""Makes one process's micro-batches of ``training_data``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from gptpar.adapter.options import EngineOptions
from gptpar.errors import GptparError

Batch = TypeVar("Batch")


class EpochSampler(DistributedSampler[Any]):
    """A new order whenever it is iterated, as torch's loaders have it; ``set_epoch`` chooses that of the next epoch."""

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.epoch += 1
        return order


def make_loader(
    dataset: Dataset[Any],
    options: EngineOptions,
    rank: int,
    world: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    *,
    micro_batch_size: int | None = None,
    num_workers: int = 0,
    shuffle: bool = True,
) -> DataLoader[Any]:
    """A loader of this process's micro-batches, in a new order in each epoch that depends on ``options.seed``.

    For one ``train_batch_size``, a step of full micro-batches consists of the same samples on any number of processes.
    With ``options.drop_last``, the last samples are left out if they do not fill a micro-batch on every process; they
    are others in each epoch. Otherwise they make a smaller micro-batch. All processes get equally many: the epoch's
    first samples are repeated where that is needed.

    Args:
        rank, world: of the data-parallel processes.
        collate_fn: makes a micro-batch of a list of samples; default: torch's.
        micro_batch_size: default: that of ``options``.
        num_workers: processes that load; 0: this one.
        shuffle: ``False``: each epoch has the data set's order.

    Raises:
        GptparError: the data set has no length and there are several processes, or it has too few samples for one
            micro-batch.
    """
    size = options.batch.micro_batch_size if micro_batch_size is None else micro_batch_size
    loader_of = partial(
        DataLoader,
        dataset,
        batch_size=size,
        drop_last=options.drop_last,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
    )
    if isinstance(dataset, IterableDataset):
        if world > 1:
            raise GptparError(
                f"training_data is an IterableDataset, which {world} processes would each read from the beginning: "
                "pass a Dataset with a length, or iterate over a loader of your own that reads this process's part."
            )
        return loader_of()
    samples = len(dataset)  # type: ignore[arg-type]
    if samples < (size * world if options.drop_last else 1):
        raise GptparError(
            f"training_data has {samples} samples, fewer than one micro-batch of {size} on each of {world} "
            "process(es): use more data, or lower train_micro_batch_size_per_gpu."
        )
    order: dict[str, Any] = {"shuffle": shuffle, "seed": options.seed, "drop_last": options.drop_last}
    return loader_of(sampler=EpochSampler(dataset, world, rank, **order))


class RepeatingLoader(Generic[Batch]):
    """The batches of a loader, without end; each epoch has an order of its own.

    Args:
        loader: if its sampler has ``set_epoch``, that is called before each epoch.
    """

    def __init__(self, loader: Iterable[Batch]):
        self.loader, self.epoch = loader, 0
        self._batches = self._begin()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            GptparError: the loader has none.
        """
        for batch in self._batches:
            return batch
        self.epoch += 1
        self._batches = self._begin()
        for batch in self._batches:
            return batch
        raise GptparError("the data loader has no batch: use more data, or smaller micro-batches.")

    def _begin(self) -> Iterator[Batch]:
        sampler = getattr(self.loader, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.epoch)  # type: ignore[union-attr]
        return iter(self.loader)
