"""``deepspeed.checkpointing.get_cuda_rng_tracker``: named states of the device's random numbers.

Megatron's layers draw dropout from the state ``model-parallel-rng``, which differs between the processes that divide a
layer, while all others draw from the default state. Recomputation draws from both what the forward pass drew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from gptpar.errors import GptparError

MODEL_PARALLEL = "model-parallel-rng"
"""The state's name in Megatron and DeepSpeed."""

SEED_DISTANCE = 2718
"""Distance of the model-parallel seeds from the default one, as in Megatron."""


def _random() -> Any:
    """The module that has the device's random numbers."""
    return torch.cuda if torch.cuda.is_available() else torch


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    before = _random().get_rng_state()
    try:
        yield
    finally:
        _random().set_rng_state(before)


class CudaRNGStatesTracker:
    """States of the device's random numbers by name; without a GPU, of the CPU's.

    Attributes:
        states_: name -> state.
        seeds_: the seeds that have begun one.
    """

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """A copy of the dictionary."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Begin a state with a seed.

        Raises:
            GptparError: there is such a state, or one with that seed.
        """
        if name in self.states_ or seed in self.seeds_:
            raise GptparError(f"random state {name!r} with seed {seed}: the name or the seed is taken: take another.")
        with _kept():
            _random().manual_seed(seed)
            self.states_[name] = _random().get_rng_state()
        self.seeds_.add(seed)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """A context that draws from a state.

        Raises:
            GptparError: there is no such state.
        """
        if name not in self.states_:
            known = ", ".join(self.states_) or "none; call model_parallel_cuda_manual_seed(seed) first"
            raise GptparError(f"there is no random state {name!r}; known: {known}.")
        with _kept():
            _random().set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = _random().get_rng_state()

    def drawing_again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function for a recomputation: calls after the first draw from the first's states, and keep none."""
        return partial(_draw, self, function, []) if self.states_ else function


def _draw(tracker: CudaRNGStatesTracker, function: Callable[..., Any], first: list[Any], *args: Any) -> Any:
    if not first:
        first.append(tracker.get_states())
        return function(*args)
    now = tracker.get_states()
    tracker.set_states(first[0])
    try:
        return function(*args)
    finally:
        tracker.set_states(now)


_TRACKER = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The process's states: Megatron's layers ask for them wherever they are."""
    return _TRACKER


def seed_all(seed: int, model_parallel_rank: int) -> None:
    """Seed the default state, alike on the processes that divide a layer, and the model-parallel one, which differs."""
    _TRACKER.reset()
    _random().manual_seed(seed)
    _TRACKER.add(MODEL_PARALLEL, seed + SEED_DISTANCE + model_parallel_rank)


def reseed_model_parallel(seed: int, model_parallel_rank: int) -> None:
    """Begin the model-parallel state again."""
    with _kept():
        _random().manual_seed(seed + SEED_DISTANCE + model_parallel_rank)
        _TRACKER.states_[MODEL_PARALLEL] = _random().get_rng_state()
