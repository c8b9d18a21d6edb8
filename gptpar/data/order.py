"""Decides which samples each data-parallel rank reads: a pure function of the samples consumed so far.

A global batch at ``consumed`` is cut into micro-batches: micro-batch j of rank r holds the places
[consumed + j mbs dp + r mbs, + mbs) of the run. An order maps these places to samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Literal, Protocol

import numpy as np
import torch

from gptpar.data.kernels import shuffle_in_place
from gptpar.errors import DataError

OrderName = Literal["single", "cyclic"]
NO_SAMPLE = -1  # in place of a sample's index: a row of padding


class SampleOrder(Protocol):
    def indices(self, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
        """int64[micro_batch_size]: a rank's samples of the micro-batch that starts at ``consumed``.

        Raises:
            DataError: the data set ends before this micro-batch does.
        """
        ...


def micro_batch_starts(consumed: int, global_batch_size: int, micro_batch_size: int, dp_size: int) -> range:
    """Samples consumed before each micro-batch of a global batch."""
    step = micro_batch_size * dp_size
    if global_batch_size < 1 or global_batch_size % step:
        raise DataError(
            f"a global batch of {global_batch_size} cannot be cut into micro-batches of {micro_batch_size} on "
            f"{dp_size} data-parallel ranks; make it a multiple of {step}"
        )
    return range(consumed, consumed + global_batch_size, step)


class SingleOrder:
    """Samples in the data set's own order, each once."""

    def __init__(self, num_samples: int):
        self.num_samples = num_samples

    def indices(self, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
        end = consumed + micro_batch_size * dp_size
        if end > self.num_samples:
            raise DataError(
                f"samples {consumed:,} to {end - 1:,} are needed, but the data set has {self.num_samples:,}; train "
                "for fewer samples, use more data, or choose the cyclic order"
            )
        return _places(consumed, micro_batch_size, dp_rank)


class ShardedCyclicOrder:
    """Megatron's ``cyclic`` order with data sharding: each rank permutes its own part of the samples in every epoch.

    The global batch therefore depends on dp_size and micro_batch_size, as in Megatron; CyclicOrder does not.
    """

    def __init__(self, num_samples: int):
        self.num_samples = num_samples
        self._permutation = _Latest(_permute_as_megatron)

    def indices(self, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
        step = micro_batch_size * dp_size
        used = self.num_samples - self.num_samples % step  # the incomplete tail of an epoch is dropped
        if not used:
            raise DataError(f"one micro-batch on all ranks takes {step} samples, the data set has {self.num_samples}")
        epoch, place = divmod(consumed, used)
        if place % step:
            raise DataError(
                f"{consumed:,} consumed samples lie inside a micro-batch: {place:,} of the {used:,} samples of epoch "
                f"{epoch} is no multiple of {step}; resume with the batch sizes and dp of before, or without "
                "--data-sharding"
            )
        bucket = used // dp_size
        start = place // dp_size
        return dp_rank * bucket + self._permutation(epoch, bucket)[start : start + micro_batch_size]


class CyclicOrder:
    """All samples in a new order in every epoch; global batches do not depend on dp or micro-batch size.

    An epoch's permutation is a function of (seed, epoch). Epochs follow each other without a gap, so that no samples at
    an epoch's end are lost or repeated, unlike in Megatron's unsharded order.
    """

    def __init__(self, num_samples: int, seed: int):
        self.num_samples = num_samples
        self._permutation = _Latest(partial(_permute, seed))

    def indices(self, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
        places = _places(consumed, micro_batch_size, dp_rank)
        epochs = places // self.num_samples
        samples = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            samples[here] = self._permutation(epoch, self.num_samples)[places[here] % self.num_samples]
        return samples


class RepeatingOrder:
    """Samples in the data set's own order; after its end, again from its start."""

    def __init__(self, num_samples: int):
        self.num_samples = num_samples

    def indices(self, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
        return _places(consumed, micro_batch_size, dp_rank) % self.num_samples


class WholeOrder:
    """Samples in the data set's own order, each once; NO_SAMPLE fills up the last global batch."""

    def __init__(self, num_samples: int):
        self.num_samples = num_samples

    def indices(self, consumed: int, micro_batch_size: int, dp_rank: int, dp_size: int) -> np.ndarray:
        places = _places(consumed, micro_batch_size, dp_rank)
        return np.where(places < self.num_samples, places, NO_SAMPLE)


def make_order(name: OrderName, num_samples: int, seed: int = 0, *, data_sharding: bool = False) -> SampleOrder:
    """The order of a ``--dataloader-type``.

    Args:
        seed: seed of the cyclic order; Megatron's sharded order depends on the epoch alone.
        data_sharding: whether the cyclic order is Megatron's, which depends on dp_size and micro_batch_size.

    Raises:
        DataError: an unknown name, or no sample to order.
    """
    if num_samples < 1:
        raise DataError("the data set has no samples to read; ask for more, or use a larger corpus")
    if name == "single":
        return SingleOrder(num_samples)
    if name == "cyclic":
        return ShardedCyclicOrder(num_samples) if data_sharding else CyclicOrder(num_samples, seed)
    raise DataError(f"unknown sample order {name!r}; choose single or cyclic")


def _places(consumed: int, micro_batch_size: int, dp_rank: int) -> np.ndarray:
    """int64[micro_batch_size]: a rank's places of the micro-batch that starts at ``consumed``."""
    start = consumed + dp_rank * micro_batch_size
    return np.arange(start, start + micro_batch_size)


def _permute(seed: int, epoch: int, size: int) -> np.ndarray:
    """A permutation that is the same in every version of numpy, because RandomState's stream is frozen."""
    order = np.arange(size, dtype=np.uint32 if size < 2**32 else np.int64)
    shuffle_in_place(order, np.random.RandomState([seed, epoch]))
    return order


def _permute_as_megatron(epoch: int, size: int) -> np.ndarray:
    generator = torch.Generator()
    generator.manual_seed(epoch)
    return torch.randperm(size, generator=generator).numpy()


class _Latest:
    """Remembers the latest permutation of (epoch, size), since a run stays in one epoch for long."""

    def __init__(self, make: Callable[[int, int], np.ndarray]):
        self._make = make
        self._latest: tuple[int, int, np.ndarray] = (-1, 0, np.zeros(0, np.int64))
        self._lock = threading.Lock()

    def __call__(self, epoch: int, size: int) -> np.ndarray:
        with self._lock:
            if self._latest[:2] != (epoch, size):
                self._latest = (epoch, size, self._make(epoch, size))
            return self._latest[2]
