"""``ParameterGradients``: gradients in ``parameter.grad`` between backward pass and step, as in plain torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gptpar.engine.engine import Engine


class ParameterGradients:
    """Shows each parameter's gradient in ``.grad``: a view of the engine's sum, so that changes in place count.

    Without ZeRO and offload, a process has whole gradients where autograd would leave them. ``.grad`` has the number
    format of its parameter, which sums of 16-bit gradients have not; then it stays empty, as with ZeRO.

    Args:
        engine: of the module.
        parameters: the trained ones, by first name.
        num_processes: number of data-parallel processes, over whose gradients the mean is shown.
    """

    def __init__(self, engine: Engine, parameters: Mapping[str, nn.Parameter], num_processes: int):
        self._engine, self._parameters, self._num_processes = engine, parameters, num_processes
        self._views: dict[str, torch.Tensor] = {}
        self._shown: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._hidden: list[tuple[nn.Parameter, torch.Tensor]] = []

    @property
    def are_shown(self) -> bool:
        """Whether ``.grad`` has gradients now."""
        return bool(self._shown)

    @torch.no_grad()
    def show(self, *, final: bool) -> bool:
        """After a backward pass.

        Args:
            final: whether the step's gradient is final; then sums over processes become means.

        Returns:
            Whether they have become means.
        """
        memory, arrived = self._engine.gradients.memory, self._engine.gradients.arrived
        if any(self._parameters[name].dtype != memory.shard.dtype for name in arrived):
            return False
        becomes_mean = final and self._num_processes > 1
        if becomes_mean:
            memory.shard.div_(self._num_processes)
        if not self._views or next(iter(self._views.values())).dtype != memory.shard.dtype:
            for unit in self._engine.table.units:
                self._views |= unit.views(memory.sum_of(unit))
        names = self._views if becomes_mean else arrived
        self._hidden = [(self._parameters[name], self._views[name]) for name in names]
        self.show_again()
        return becomes_mean

    def show_again(self) -> None:
        """After :meth:`hide`, if nothing has come since: the same gradients as before."""
        hidden, self._hidden = self._hidden, []
        for parameter, view in hidden:
            parameter.grad = view
        self._shown += hidden

    @torch.no_grad()
    def hide(self) -> None:
        """Empty ``.grad``, to which autograd would add, and use other tensors that the user has put there."""
        self._shown, self._hidden = [], self._shown
        for parameter, view in self._hidden:
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                view.zero_()
            elif grad is not view:
                view.copy_(grad)
