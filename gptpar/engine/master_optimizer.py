"""The optimizer of this process's master weights, in fp32 or wider, on the device and at the subscriber."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import torch

from gptpar.engine.flat_optimizer import FlatOptimizer, FlatState
from gptpar.engine.matrix_step import MatrixExchange, MatrixStep
from gptpar.engine.ranges import Home, Range
from gptpar.engine.subscriber import Subscriber
from gptpar.engine.table import ParameterTable
from gptpar.optim.grad_norm import square_of
from gptpar.optim.group_ranges import GPT_FAMILIES, Family
from gptpar.optim.state_layout import StateLayout
from gptpar.optim.update import Hyperparameters, Update
from gptpar.system.state_guard import StateGuard
from gptpar.topology.tensor_parts import TensorParts

HostViews = Mapping[str, Sequence[tuple[str, int, torch.Tensor]]]
"""``weights`` or one of the states -> (unit, first element within its offloaded range, view of the values)."""

Only = Literal[Home.DEVICE] | HostViews
"""Elements of one home: the device's, or the host's at the place that these views show."""


class MasterOptimizer:
    """The optimizer of this process's shard of the master weights; each parameter group has its own update.

    The device's elements are updated in one pass (:class:`~gptpar.engine.flat_optimizer.FlatOptimizer`): clipping, loss
    scale, the skipping of non-finite gradients and the rounding to model parameters happen inside it. The subscriber
    updates the others.

    Args:
        updates: by group.
        table: of this process's parameters.
        grad: the gradient sum of the device's elements of all units in a row.
        clip_grad: the largest gradient norm that is not clipped (0: any).
        host: updates the other elements; ``None`` where there are none.
        families: of the parameter groups; each group is in one. A family takes launches of its own.
        master: memory for the master weights; ``None``: new memory. An fp32 model passes its own parameters.
        parameters: unit -> the model parameters that :meth:`step` writes in the same pass; equally long as the unit's
            master weights on the device.
        exchange: how processes exchange the elements of matrices.

    Attributes:
        updates: by group.
        vectors: ``weights`` and each of the updates' states -> the device's elements that have it, in a row.
        master_weights: unit -> its master weights on the device.
        guard: is asked before a step overwrites any of it, on the device or at ``host``.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        table: ParameterTable,
        grad: torch.Tensor,
        clip_grad: float,
        host: Subscriber | None = None,
        *,
        families: Sequence[Family] = GPT_FAMILIES,
        master: torch.Tensor | None = None,
        parameters: Mapping[str, torch.Tensor] | None = None,
        exchange: MatrixExchange | None = None,
    ):
        self.updates, self.clip_grad, self.grad, self.host = tuple(updates), clip_grad, grad, host
        self._table, self._first_updates = table, self.updates
        self.guard = StateGuard() if host is None else host.guard
        wide = torch.promote_types(grad.dtype, torch.float32)
        self.master = torch.zeros_like(grad, dtype=wide) if master is None else master
        self._layout = StateLayout(table.device_group_ranges(), updates, len(grad))
        lengths, dtype_of = self._layout.lengths, self._layout.dtype_of
        states = {name: grad.new_zeros(length, dtype=dtype_of(name, wide)) for name, length in lengths.items()}
        self.vectors = {"weights": self.master, **states}
        self.master_weights = self._table.split(self.master)
        self._steps = torch.zeros((), dtype=torch.float64, device=grad.device)
        self._parameters, self._exchange = parameters, exchange or MatrixExchange({})
        self._make_steps(families)

    def _make_steps(self, families: Sequence[Family]) -> None:
        """Make what updates the device's elements, for the table's groups."""
        table, state = self._table, FlatState(self.vectors, self.grad, self._steps)
        self._flat = FlatOptimizer(self.updates, state, table.device_group_ranges(), families, self.guard)
        ends = itertools.pairwise(itertools.accumulate(table.on_device.values(), initial=0))
        written = ((self._parameters or {}).get(unit) for unit in table.on_device)
        self._flat.lay_out([(*pair, one) for pair, one in zip(ends, written, strict=True)])
        self._matrices = MatrixStep(
            *(self.updates, families, table, self.vectors, self._layout, self._exchange, self.guard),
            *(self.host, self._parameters),
        )

    def divide_groups(self, origins: Sequence[int]) -> None:
        """The table has other groups, each a part of one of the first groups, by number; no step is under way."""
        self.updates = tuple(self._first_updates[group] for group in origins)
        self._make_steps([(group,) for group in range(len(origins))])
        if self.host is not None:
            self.host.divide_groups(self._table.offloaded(), origins)

    def read_gradients(self, grad: torch.Tensor) -> None:
        """Read the coming steps' gradients from other memory, maybe in another number format."""
        self.grad = grad
        self._flat.read_gradients(grad)

    def miss(self, steps: tuple[int, ...]) -> None:
        """Let the coming steps' number be smaller for some groups; ``steps``: by how much, for each group."""
        self._flat.miss(steps)
        if self.host is not None:
            self.host.miss(steps)

    def bytes_of(self, group: int) -> int:
        """Bytes of device memory that an element of a group takes: master weight, state and gradient."""
        return self.updates[group].state_bytes(self.master.element_size()) + self.grad.element_size()

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's master weights, states and gradients, without padding."""
        return sum(one.length * self.bytes_of(one.group) for one in self._table.ranges(home=Home.DEVICE))

    def square_of_weights(self) -> torch.Tensor:
        """Sum of squares (fp64) of the master weights that this process counts, on device and host."""
        square = square_of([self.master[start:stop] for start, stop in self._table.device_counted()], self.grad.device)
        return square if self.host is None else square + self.host.square_of_weights()

    def zeros_in_grad(self) -> int:
        """Zeros among the device's gradient elements that this process counts."""
        grads = self._table.split(self.grad)
        counted = (one for one in self._table.ranges(home=Home.DEVICE) if one.counted)
        return sum(int((grads[one.unit][one.start : one.stop] == 0).sum()) for one in counted)

    @torch.no_grad()
    def step(self, norm: torch.Tensor, hyperparameters: tuple[Hyperparameters, ...], loss_scale: float) -> torch.Tensor:
        """Update the master weights from the gradient sum.

        Args:
            norm: L2 norm of the whole model's gradient before clipping, without the loss scale (fp64 scalar).
            hyperparameters: this step's, by group.
            loss_scale: the factor in the gradient sum, by which the update divides.

        Returns:
            1.0 where the gradient was not finite and nothing was changed, else 0.0, on the device.

        Raises:
            ValueError: groups of one family differ by more than the weight decay; nothing was changed.
        """
        self._flat.check(hyperparameters)
        self.guard.wait_until_held()
        if self.host is not None:  # first: it learns the norm before the device has updated its own elements
            self.host.step(norm, hyperparameters, loss_scale)
        steps = self._flat.step(hyperparameters, norm, loss_scale, self.clip_grad)
        self._matrices.step(steps, self.grad)
        return steps[0].skipped

    def expect_step(self, hyperparameters: tuple[Hyperparameters, ...], loss_scale: float) -> None:
        """Announce the probable arguments of :meth:`step`: the host may begin during the backward pass."""
        if self.host is not None:
            self.host.expect_step(hyperparameters, loss_scale)

    def host_views(self, kinds: Collection[str] | None = None) -> HostViews:
        """Locate the host's state once its last step is done; threads other than the training loop's may ask, too.

        The next step may move the state to other memory; the views then keep showing the state before it.

        Args:
            kinds: see :meth:`state_tensors`.
        """
        assert self.host is not None
        return {kind: list(self.host.parts(kind, beside_loop=True)) for kind in self.vectors if _among(kind, kinds)}

    def state_tensors(
        self, only: Only | None = None, kinds: Collection[str] | None = None
    ) -> dict[str, dict[str, TensorParts]]:
        """Views, not copies, for a checkpoint: ``weights`` and each of the states, by global parameter name.

        Args:
            only: elements of one home; ``None``: of both, where they are now.
            kinds: ``weights`` or states; ``None``: all.
        """
        return {kind: self.parts(kind, only) for kind in self.vectors if _among(kind, kinds)}

    def parts(self, kind: str, only: Only | None = None) -> dict[str, TensorParts]:
        """This process's parts of each parameter, on device and host.

        Gradients are converted to the master weights' number format, because device and host may keep different ones.
        The host has gradients only between the end of the backward pass and the step.

        Args:
            kind: ``weights`` or one of the states, whose values are views, or ``grad``.
            only: see :meth:`state_tensors`.
        """
        params = self._table.params.items()
        empty = [name for name, one in params if not one.info.full_shape.numel() and self._has(one.group, kind)]
        dtype = self.vectors.get(kind, self.master).dtype
        return self._table.parts(self.ranges_of(kind, only), dtype, empty)  # a checkpoint lists empty ones

    def ranges_of(self, kind: str, only: Only | None = None) -> Iterator[tuple[Range, torch.Tensor]]:
        """Each range that has this kind of values, with them as in :meth:`parts`.

        A range that the host keeps in several buckets comes in parts.
        """
        here = self._ranges_here(kind) if only is None or only is Home.DEVICE else iter(())
        if self.host is None or only is Home.DEVICE:
            return here
        held = self.host.parts(kind) if only is None else only[kind]
        return itertools.chain(here, self._table.ranges_on_host(held))

    def _ranges_here(self, kind: str) -> Iterator[tuple[Range, torch.Tensor]]:
        for at, one in self._table.ranges_on_device():
            if kind == "grad":
                yield one, self.grad[at : at + one.length]
            elif self._has(one.group, kind):
                yield one, self._layout.view(kind, self.vectors[kind], at, at + one.length)

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states that any group has."""
        return tuple(name for name in self.vectors if name != "weights")

    def _has(self, group: int, kind: str) -> bool:
        return kind == "grad" or kind in self.updates[group].vectors

    @property
    def steps_taken(self) -> int:
        """Updates made so far, skipped ones not counted (reading it waits for the device)."""
        return int(self._steps.item())

    @steps_taken.setter
    def steps_taken(self, count: int) -> None:
        self._steps.fill_(count)
        if self.host is not None:
            self.host.steps_taken = count


def _among(kind: str, kinds: Collection[str] | None) -> bool:
    return kinds is None or kind in kinds
