"""The interface of elementwise optimizers (state vectors, hyperparameters, update), and clipping's divisor.

An optimizer is elementwise if the new value of an element depends on that element's own weight, gradient and state
alone. Then the owner of any range of a flat vector can update that range, on the device or on the CPU. The engine, the
CPU optimizer, checkpoints and memory planning know an optimizer by its :class:`ElementwiseOptimizer` only.

All elementwise optimizers share the first and the last operation. For each element, with the gradient ``grad``, the
weight ``p`` and the state vectors ``s``::

    g         = grad * scale                    scale = 1 / divisor,  decay = 1 - lr * weight_decay
    change, s = optimizer.change(g, s, numbers)
    p         = decay * p - change

An optimizer may couple the weight decay (L2 regularisation), which is then a part of the gradient::

    g         = grad * scale + decay * p        decay = weight_decay
    change, s = optimizer.change(g, s, numbers)
    p         = p - change

``divisor`` is the loss scale times the clip divisor, ``max(1, (norm + 1e-6) / max_norm)``. Every operation is rounded
to nearest by itself, so an element gets the same bits wherever it is updated. Torch's operators round like this if each
does a single operation; ``lerp``, ``addcmul`` and ``alpha`` would fuse a product with a sum.

An optimizer over whole matrices (Muon) is not elementwise (:mod:`gptpar.optim.matrix_update`): a shard of a unit may
begin in the middle of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gptpar.optim.rounded_states import as_kept, as_wide
from gptpar.optim.update import Update

CLIP_EPS = 1e-6
"""Added to the norm before it is compared with the largest, as torch's ``clip_grad_norm_`` does."""

MAX_STEP_BITS = 31
"""Binary digits of the largest step's number."""

_BLOCK = 1 << 20
"""Elements that are computed at a time on a CPU."""


Change = Callable[[Tensor, Sequence[Tensor], Sequence[Any]], tuple[Tensor, list[Tensor]]]
"""(gradient, old state vectors, numbers) -> (subtrahend of the decayed weights, new state vectors). The vectors [n] and
the scalar numbers have the dtype of the master weights."""


@dataclass(frozen=True)
class ElementwiseOptimizer(Update):
    """An elementwise optimizer's description.

    Attributes:
        change: the update of the elements.
        device_kernel: makes a fused kernel for vectors like the given one, or returns ``None`` if it has none.
        host_kernel: makes a compiled kernel with the given number of threads. Without a kernel, torch's operators
            update.
        couples_decay: add the weight decay to the gradient (L2 regularisation) instead of subtracting it from the
            weights (AdamW).
    """

    change: Change
    device_kernel: Callable[[Tensor], DeviceKernel | None] | None = None
    host_kernel: Callable[[int], HostKernel] | None = None
    couples_decay: bool = False


@dataclass(frozen=True)
class UpdateVectors:
    """Flat vectors in a device's memory that one call updates.

    Attributes:
        vectors: [n] master weights, state vectors, and the gradient, in a dtype that is not wider than theirs.
        parameters: [n] model parameters to write, in their own dtype; ``None``: the master weights are the model's
            parameters.
        ranges: (start, stop, whether they decay) of the elements to update. A kernel may update other elements, too,
            so their gradients have to be zero.
        decays: [blocks] whether elements decay, by blocks of ``ALIGNMENT``; ``None``: all do.
    """

    vectors: tuple[Tensor, ...]
    parameters: Tensor | None
    ranges: Sequence[tuple[int, int, bool]]
    decays: Tensor | None = None


class DeviceStep(Protocol):
    """One step of one family of parameter groups; its numbers are on the device."""

    @property
    def skipped(self) -> Tensor:
        """1.0 where the gradient's norm is not finite and nothing changes, else 0.0 (fp32 scalar)."""

    def update(self, this: UpdateVectors) -> None:
        """Update some vectors."""


class DeviceKernel(Protocol):
    """Makes the steps of one family of parameter groups in a device's memory."""

    def begin_step(self, how: Any, norm: Tensor, loss_scale: float, max_norm: float, steps: Tensor) -> DeviceStep:
        """Count a step and compute its numbers, without waiting for a GPU.

        Args:
            how: the hyperparameters of the elements that decay; those of the others have a weight decay of 0.
            norm: of the whole gradient, without the loss scale (fp64 scalar); if it is not finite, nothing changes.
            max_norm: the gradient is clipped to this norm (0: never).
            steps: steps so far (fp64 scalar on the device); increased by one unless the step is skipped.
        """


class Done(NamedTuple):
    """An update that was made.

    Attributes:
        finite: whether every gradient was finite.
        begin, end: times of :func:`time.monotonic`.
    """

    finite: bool
    begin: float
    end: float


class HostKernel(Protocol):
    """Updates vectors in host memory for the CPU optimizer."""

    states: tuple[str, ...]
    """Names of the state vectors."""

    rounded: Mapping[str, torch.dtype]
    """States that are kept in 16 or 8 bits -> their dtype (:mod:`gptpar.optim.rounded_states`)."""

    threads: int

    @property
    def isa(self) -> str:
        """Name of the instruction set, or ``torch``."""

    def step_of(self, how: Any, step: int, divisor: float) -> Any:
        """The argument of :meth:`order` for one group's elements.

        Args:
            step: number of the step, from 1.
            divisor: of the gradients.
        """

    def order(
        self,
        state: Sequence[Tensor],
        grad: Tensor,
        ranges: Sequence[tuple[int, int, Any]],
        *,
        into: Sequence[Tensor] | None = None,
        low: Tensor | None = None,
        only: np.ndarray | None = None,
    ) -> Callable[[], Done]:
        """Put an update into a queue, and return at once.

        Args:
            state: [n] master weights and state vectors, contiguous fp32 or fp64, those in :attr:`rounded` in theirs.
            grad: [n].
            ranges: (start, stop, result of :meth:`step_of`), ascending.
            into: memory for the new state; default: in place.
            low: [n] gets the new weights, rounded to its dtype; it may be ``grad`` itself.
            only: the ranges (:mod:`~gptpar.offload.buckets`) whose outputs are needed; default: all.

        Returns:
            A call that waits for the end of the update; to be called once.
        """

    def wake(self) -> None:
        """Prepare for an order within a fraction of a millisecond."""

    def square(self, grad: Tensor) -> float:
        """Sum of squares in double precision."""


def clipped_divisor(norm: float, loss_scale: float, max_norm: float) -> float:
    """The divisor of the gradients: the loss scale times the clip divisor.

    Args:
        norm: of the whole gradient, without the loss scale.
        max_norm: largest norm that is not clipped (0: any).
    """
    return loss_scale * max(1.0, (norm + CLIP_EPS) / max_norm) if max_norm > 0 else loss_scale


def divisor_on_device(norm: Tensor, loss_scale: float, max_norm: float) -> Tensor:
    """:func:`clipped_divisor` by torch's operators, without waiting for the device."""
    # A tensor divided by a number is multiplied by its inverse on GPUs, so every number is a tensor.
    scale, largest = torch.full_like(norm, loss_scale), torch.full_like(norm, max_norm)
    return scale * ((norm + CLIP_EPS) / largest).clamp(min=1.0) if max_norm > 0 else scale


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` for a non-negative integer, by repeated squaring.

    A library's ``pow`` is not rounded correctly, and differs between processors.
    """
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def power_of_tensor(base: Tensor, exponent: Tensor) -> Tensor:
    """:func:`power` of scalar tensors, without waiting for the device."""
    result, left = torch.ones_like(base), exponent.to(torch.int64)
    for _ in range(MAX_STEP_BITS):
        result = torch.where(left % 2 == 1, result * base, result)
        base, left = base * base, left // 2
    return result


def square_root(x: Tensor) -> Tensor:
    """The correctly rounded square root: torch's on CPUs (MKL) is sometimes off by a unit in the last place."""
    if x.device.type != "cpu":
        return x.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(x.reshape(-1).numpy())).view(x.shape)


def blocks_of(vector: Tensor) -> Iterator[slice]:
    """The parts of a vector that are computed at a time, which bounds the memory of intermediate results.

    On a GPU each operator costs the host a launch, so that the parts are longer.
    """
    size = _BLOCK if vector.device.type == "cpu" else _BLOCK << 4
    yield from (slice(start, start + size) for start in range(0, len(vector), size))


@torch.no_grad()
def update(
    change: Change,
    state: Sequence[Tensor],
    grad: Tensor,
    scale: Any,
    decay: Any,
    numbers: Sequence[Any],
    *,
    into: Sequence[Tensor] | None = None,
    low: Tensor | None = None,
    skipped: Tensor | None = None,
    couples_decay: bool = False,
    key: Tensor | int = 0,
) -> None:
    """Update vectors by torch's operators, on any device.

    Args:
        state: [n] master weights and state vectors, all of one dtype (fp32 or fp64) but for rounded ones.
        grad: [n] of a dtype not wider than theirs.
        scale, decay, numbers, couples_decay: see the module; numbers or scalar tensors, which are rounded once to the
            state's dtype.
        into: memory for the new state; default: in place.
        low: [n] gets the new parameters, rounded to its dtype; it may be ``grad`` itself.
        skipped: if it is not zero, nothing changes (scalar).
        key: of the step, for rounded states (:mod:`gptpar.optim.rounded_states`).
    """
    weights, *_ = state
    scale, decay, *numbers = (
        torch.as_tensor(number, dtype=weights.dtype, device=weights.device) for number in (scale, decay, *numbers)
    )
    for block in blocks_of(weights):
        p, *states = old = [weights[block], *as_wide([t[block] for t in state[1:]], weights.dtype)]
        g = grad[block].to(p.dtype) * scale
        step, states = change(g + decay * p if couples_decay else g, states, numbers)
        new = [p - step if couples_decay else decay * p - step, *states]
        if skipped is not None:
            new = [torch.where(skipped == 0, after, before) for after, before in zip(new, old, strict=True)]
        for target, value in zip(into or state, as_kept(new, old, state, key), strict=True):
            target[block] = value
        if low is not None:
            low[block] = new[0]
