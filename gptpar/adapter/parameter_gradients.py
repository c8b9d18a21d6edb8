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
        sums: whether their sum is, in place of the mean.
    """

    def __init__(
        self, engine: Engine, parameters: Mapping[str, nn.Parameter], num_processes: int, *, sums: bool = False
    ):
        self._engine, self._parameters, self._num_processes, self._sums = engine, parameters, num_processes, sums
        self._views: dict[str, torch.Tensor] = {}
        self._shown: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # (parameter, view, what its .grad has)
        self._hidden: list[tuple[str, torch.Tensor]] = []

    @property
    def are_shown(self) -> bool:
        """Whether ``.grad`` has gradients now."""
        return bool(self._shown)

    @torch.no_grad()
    def show(self, *, final: bool) -> bool:
        """After a backward pass.

        Args:
            final: whether the step's gradient is final; then sums over processes become means, unless sums are wanted.

        Returns:
            Whether they have become means.
        """
        memory, arrived = self._engine.gradients.memory, self._engine.gradients.arrived
        if any(self._parameters[name].dtype != memory.shard.dtype for name in arrived):
            return False
        is_of_all = final and self._num_processes > 1
        becomes_mean = is_of_all and not self._sums
        if becomes_mean:
            memory.shard.div_(self._num_processes)
        if not self._views or next(iter(self._views.values())).dtype != memory.shard.dtype:
            for unit in self._engine.table.units:
                self._views |= unit.views(memory.sum_of(unit))
        trained = (name for name in self._views if self._parameters[name].requires_grad)
        self._hidden = [(name, self._views[name]) for name in (trained if is_of_all else arrived)]
        self.show_again()
        return becomes_mean

    def show_again(self) -> None:
        """After :meth:`hide`, if nothing has come since: the same gradients as before."""
        hidden, self._hidden = self._hidden, []
        for name, view in hidden:
            grad = self._parameters[name].grad = view.detach()  # a tensor of its own: the user may give it other memory
            self._shown.append((name, view, grad))

    @torch.no_grad()
    def hide(self) -> None:
        """Copy the gradients that the user has changed into the sums, and clear ``.grad``: autograd would add to it."""
        shown, self._shown = self._shown, []
        self._hidden = [(name, view) for name, view, _ in shown]
        for name, view, before in shown:
            parameter = self._parameters[name]
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                view.zero_()
            elif grad is not before or grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
        if shown:
            self._take_given()

    def _take_given(self) -> None:
        """Use gradients that the user has given to parameters without one."""
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            if grad is None:
                continue
            parameter.grad = None
            if parameter.requires_grad:
                self._views[name].copy_(grad)
                self._engine.gradients.count(name)
                self._hidden.append((name, self._views[name]))
