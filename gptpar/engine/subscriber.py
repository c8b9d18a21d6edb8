"""The interface of a subscriber: it updates the elements that the device's optimizer does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from gptpar.optim.group_ranges import OffloadedPartition
from gptpar.optim.update import Hyperparameters
from gptpar.system.state_guard import StateGuard


class HostGradientSums(Protocol):
    """Sums of the subscriber's gradients over micro-batches, in host memory.

    Attributes:
        busy_s: seconds that additions took.
    """

    busy_s: float

    def add(self, unit: str, grad: torch.Tensor, *, first: bool, last: bool) -> None:
        """Add a micro-batch's gradient of a unit. The call may wait for earlier ones. ``grad`` changes no more.

        Args:
            first: whether the step's sum begins with it.
            last: whether the sum is final with it: it is submitted, as by :meth:`Subscriber.submit_gradient`.
        """

    def keep_pace(self) -> None:
        """A layer's forward pass is about to be launched: wait while the device is too many layers behind."""

    def squares(self) -> dict[str, float]:
        """Unit -> the sum of squares, over the elements that this process counts, of its final sum. Waits for it."""

    def close(self) -> None:
        """End the background work."""


class Subscriber(Protocol):
    """Updates some ranges of the master weights in the background.

    A step is: ``expect_step``, a ``submit_gradient`` for each of its units while the backward pass runs, ``step`` when
    the global norm is about to be known. Before a layer is used again, ``wait``.

    Attributes:
        guard: is asked before an update overwrites master weights or the optimizer's state.
        sums: the sums over micro-batches; ``None``: the device forms them.
    """

    guard: StateGuard
    sums: HostGradientSums | None

    def expect_step(self, hyperparameters: tuple[Hyperparameters, ...], loss_scale: float) -> None:
        """The probable hyperparameters of the coming step, by group: the subscriber may begin to update with them."""

    def miss(self, steps: tuple[int, ...]) -> None:
        """Subtract the steps that some groups have missed from the number of the coming steps; ``steps``: by group."""

    def divide_groups(self, partitions: Sequence[OffloadedPartition], origins: Sequence[int]) -> None:
        """The partitions have other groups, each a part of one of the first groups (``origins``), between two steps."""

    def submit_gradient(self, unit: str, grad: torch.Tensor) -> None:
        """A unit's gradient is final; its memory does not change until the unit's next backward pass."""

    def step(
        self,
        norm: torch.Tensor,
        hyperparameters: tuple[Hyperparameters, ...],
        loss_scale: float,
        without: frozenset[str] = frozenset(),
    ) -> None:
        """All gradients are submitted: update, with a norm (fp64 scalar) that the device may still be computing.

        Args:
            without: units that this step leaves as they are.
        """

    def expect_momenta(self, unit: str, memory: Callable[[int, int], torch.Tensor]) -> None:
        """Let the requested step write the unit's momenta that are to be orthogonalized to this device memory.

        It writes when the work that was launched before this call has finished with the memory.

        Args:
            memory: (start, stop) of elements in the unit's offloaded range whose update is one of matrices -> [n].
        """

    def wait_for_momenta(self, unit: str) -> None:
        """Return when kernels launched afterwards read a unit's momenta; a skipped step writes none."""

    def submit_directions(self, unit: str, memory: Callable[[int, int], torch.Tensor]) -> None:
        """The orthogonalized momenta, which a unit's master weights follow; like :meth:`submit_gradient`.

        Args:
            memory: as in :meth:`expect_momenta`; it does not change any more.
        """

    def wait(self, unit: str, *, block: bool = False) -> None:
        """Return when kernels launched afterwards read the unit's new parameters.

        Args:
            block: whether the new parameters are on the device when this returns.
        """

    def finish(self) -> None:
        """Return when the last step is done and its gradients are no longer needed."""

    def without_speculation(self) -> AbstractContextManager[None]:
        """A context in which the subscriber does not change the model's parameters before the next step."""

    def keep_last_step(self) -> None:
        """Give the model's parameters the values that they have before the coming step, until it is requested."""

    def publish(self) -> None:
        """Copy all master weights to the model's parameters."""

    def parts(self, kind: str, *, beside_loop: bool = False) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(unit, first element, view of the values) of ``weights``, one of the optimizer's states, or ``grad``.

        Args:
            beside_loop: whether another thread than the training loop's calls this: it waits until the last step is
                done, and the loop still waits for the new parameters itself.
        """

    def square_of_weights(self) -> float:
        """Sum of squares of the master weights that this process counts."""

    @property
    def steps_taken(self) -> int:
        """Updates made so far, skipped ones not counted."""

    @steps_taken.setter
    def steps_taken(self, count: int) -> None: ...

    def close(self) -> None:
        """End the background work."""
