"""The interface of optimizers over whole matrices: an elementwise part on either side of one that needs the matrix.

A step of a parameter group has the gradient ``grad``, the master weights ``p``, the state ``m`` and the step's
numbers; the first number is the learning rate ``lr``::

    g    = grad * scale                         scale = 1 / divisor,  decay = 1 - lr * weight_decay
    n, m = update.momentum(g, m, numbers)
    o    = update.orthogonalize(n)              of each logical matrix as a whole
    p    = decay * p - lr * o

All but the third line is elementwise, so each element's owner does it, on the device or on the CPU, with every
operation rounded by itself (:mod:`gptpar.optim.elementwise`). The engine assembles the matrices ``n``, and takes ``o``
back to the elements' owners. Which matrices a parameter has, its layer declares (:mod:`gptpar.topology.matrices`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from gptpar.config.sections.optimizer import OptimizerFlags
from gptpar.optim.elementwise import DeviceKernel, blocks_of
from gptpar.optim.update import Update
from gptpar.topology.matrices import Matrices

if TYPE_CHECKING:
    from gptpar.optim.torch_kernels import MatrixHostKernel


@dataclass(frozen=True)
class MatrixUpdate(Update, ABC):
    """An optimizer over matrices, with the settings of a run. It has one state vector."""

    def with_settings(self, flags: OptimizerFlags) -> Self:
        """The update with a run's settings."""
        return self

    @abstractmethod
    def momentum(self, g: Tensor, m: Tensor, numbers: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """The elementwise part before: returns what is to be orthogonalized, and the new state.

        Args:
            g: [n] the clipped gradient, in the dtype of the master weights.
            m: [n] the old state.
            numbers: of the step (scalars in that dtype).
        """

    @abstractmethod
    def orthogonalize(self, x: Tensor) -> Tensor:
        """Orthogonalize momenta into the directions that the learning rate multiplies, in the dtype of ``x``.

        Args:
            x: [matrices, rows, columns]; each matrix is treated by itself.
        """

    @abstractmethod
    def flops(self, rows: int, columns: int) -> float:
        """Floating-point operations of :meth:`orthogonalize` for one matrix."""

    def host_kernel(self, threads: int) -> MatrixHostKernel | None:
        """A compiled kernel of the elementwise parts; without one, torch's operators do them."""
        return None

    def device_kernel(self, like: Tensor) -> DeviceKernel | None:
        """A fused kernel of the elementwise parts for master weights like the given ones."""
        return None

    @abstractmethod
    def growth(self, fixed_outputs: bool) -> float:
        """The power of the model's width with which an update changes a layer's outputs, for muP.

        Args:
            fixed_outputs: whether the layer has as many at every width; else they grow with its inputs.
        """

    def matrices(self, declared: Matrices) -> Matrices:
        """The matrices that this run's settings make of a parameter with such a declaration."""
        return declared


@torch.no_grad()
def average(
    update: MatrixUpdate,
    momentum: Tensor,
    grad: Tensor,
    scale: Tensor,
    numbers: Sequence[Tensor],
    out: Tensor,
    skipped: Tensor | None = None,
) -> None:
    """The elementwise part before the matrix, by torch's operators, on any device.

    Args:
        momentum: [n] the state, fp32 or fp64, in place.
        grad: [n] of a dtype not wider than the state's.
        scale, numbers: scalar tensors, which are rounded once to the state's dtype.
        out: [n] gets what is to be orthogonalized, rounded to its dtype.
        skipped: if it is not zero, the state stays as it is, and ``out`` may be anything (scalar).
    """
    scale, *numbers = (number.to(momentum.dtype) for number in (scale, *numbers))
    for block in blocks_of(momentum):
        old = momentum[block]
        wanted, new = update.momentum(grad[block].to(old.dtype) * scale, old, numbers)
        out[block] = wanted
        momentum[block] = new if skipped is None else torch.where(skipped == 0, new, old)


def follow(direction: Tensor, state: Sequence[Tensor], numbers: Sequence[Any]) -> tuple[Tensor, list[Tensor]]:
    """The elementwise part after the orthogonalization, as the ``change`` of an elementwise optimizer without state.

    Args:
        direction: [n] of the orthogonalized matrices, in place of a gradient.
        numbers: the learning rate.
    """
    (lr,) = numbers
    return lr * direction, []
