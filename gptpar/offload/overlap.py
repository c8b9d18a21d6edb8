"""When TwinFlowAdamW's gradients go to the CPU optimizer, and who waits for the parameters that come back.

Without a module everything happens in ``step()``. With one, each gradient goes as it becomes final in the last backward
pass, and each module waits for its own parameters before its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.local_parameters import LocalParameter, version_of
from gptpar.offload.module_hooks import watch_gradient, watch_readers
from gptpar.optim.elementwise import Hyperparameters


class Overlap:
    """The CPU optimizer's side of a step of any module.

    Args:
        host: the CPU optimizer.
        parameters: unit -> the parameter, of those that have offloaded elements.
        speculated_elements: for which the host has memory for double buffers, once a module is attached.

    Attributes:
        host, parameters: see above.
        submitted: unit -> the gradient of the coming step that the host has, and that gradient's version then.
    """

    def __init__(self, host: HostOptimizer, parameters: Mapping[str, LocalParameter], speculated_elements: int):
        self.host, self.parameters, self._speculated_elements = host, parameters, speculated_elements
        self.submitted: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}
        self._hooks: list[Any] = []
        self._awaited: set[str] = set()
        self._attached = self._submits_early = self._in_last_backward = False

    def attach(self, module: nn.Module) -> None:
        """Have the module's parts wait for their parameters, and its gradients submitted in the last backward pass."""
        self._attached = True
        # DistributedDataParallel sums gradients after the hooks that tell of them.
        self._submits_early = not any(isinstance(part, DistributedDataParallel) for part in module.modules())
        if self._submits_early:
            self.host.add_double_buffers(self._speculated_elements)
        unit_of = {id(local.parameter): unit for unit, local in self.parameters.items()}
        for units, hooks in watch_readers(module, unit_of, self.before_forward, self.before_state_dict):
            self._awaited.update(units)
            self._hooks += hooks
        for local in self.parameters.values():
            self._hooks += watch_gradient(local.parameter, partial(self._gradient_is_final, local))

    def begin_last_backward(self) -> bool:
        """From now on gradients are final; returns whether they are submitted before the step."""
        self._in_last_backward = self._submits_early
        return self._submits_early

    def end_last_backward(self) -> None:
        """Gradients are not final any more."""
        self._in_last_backward = False

    def submit(self, local: LocalParameter, grad: torch.Tensor | None, *, again: bool = False) -> None:
        """Give the host its elements of a gradient, unless it has them and nobody has changed them since."""
        if grad is None:
            return
        version = version_of(local.parameter.grad)
        before, old = self.submitted.get(local.unit, (None, version))
        if again or before is None or before.data_ptr() != grad.data_ptr() or version != old:
            self.submitted[local.unit] = grad, version
            self.host.submit_gradient(local.unit, grad.reshape(-1)[local.on_device :])

    def step(
        self,
        grads: Mapping[str, torch.Tensor | None],
        norm: torch.Tensor,
        hyperparameters: tuple[Hyperparameters, ...],
        loss_scale: float,
        *,
        again: bool,
    ) -> None:
        """Submit the gradients that the host has not, and request the step.

        Args:
            grads: unit -> the gradient in the parameter's shape; units without one stay as they are.
            norm, hyperparameters, loss_scale: see :meth:`HostOptimizer.step`.
            again: whether to submit all of them, because they were changed unnoticed.
        """
        for unit, local in self.parameters.items():
            self.submit(local, grads[unit], again=again)
        self.submitted.clear()
        without = frozenset(unit for unit in self.parameters if grads[unit] is None)
        self.host.step(norm, hyperparameters, loss_scale, without)

    def cancel(self) -> None:
        """Forget what was submitted of a step that will not be taken; parameters have their old values again."""
        if self.submitted:
            self.submitted.clear()
            self.host.cancel()

    def finish(self) -> None:
        """Return when parameters are those of the last step, for anyone to read."""
        self.cancel()
        self.host.finish()

    def wait_after_step(self, *, is_watched: bool) -> None:
        """Wait for the parameters that no module waits for, or for all where somebody will look at them now."""
        if is_watched or not self._attached:
            self.host.finish()
        else:
            for unit in self.parameters.keys() - self._awaited:
                self.host.wait(unit)

    def close(self) -> None:
        """Let go of the module, and end the thread.

        It is called when the process ends, too: a device that does not answer must not keep it.
        """
        for hook in self._hooks:
            hook.remove()
        if self.submitted:
            self.submitted.clear()
            self.host.cancel(wait=False)
        self.host.close()

    def __reduce__(self) -> tuple[Callable[[], Overlap], tuple[()]]:
        return _of_a_copy, ()  # hooks are copied and pickled with their module

    def before_forward(self, units: list[str], block: bool, *_: object) -> None:
        """A hook: see :func:`~gptpar.offload.module_hooks.watch_readers`."""
        if not self._in_last_backward or not self.submitted.keys().isdisjoint(units):
            self.cancel()  # unless it is a block that is computed again in the backward pass
        for unit in units:
            self.host.wait(unit, block=block)

    def before_state_dict(self, *_: object) -> None:
        """A hook: see :meth:`finish`."""
        self.finish()

    def _gradient_is_final(self, local: LocalParameter, *_: object) -> None:
        if not self._in_last_backward:
            return
        if local.unit in self.submitted and self._speculated_elements:
            which = f"parameter {local.unit} got a second gradient in last_backward()"
            raise RuntimeError(f"{which}: open it for the last backward pass alone, or choose speculation='off'.")
        self.host.wait(local.unit)
        self.submit(local, local.gradient())


class _NoHost:
    """Updates nothing, so that there is nothing to wait for."""

    def wait(self, unit: str, *, block: bool = False) -> None: ...

    def finish(self) -> None: ...


def _of_a_copy() -> Overlap:
    """What the hooks of a copied or loaded module call."""
    return Overlap(cast(HostOptimizer, _NoHost()), {}, 0)
