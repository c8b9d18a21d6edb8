"""Overlaps TwinFlowAdamW's CPU optimizer with the passes of a module.

Without an attached module everything happens in ``step()``. With one, each gradient is submitted when it becomes final
in the last backward pass, and each submodule waits for its own parameters before its forward pass.
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
from gptpar.optim.update import Hyperparameters


class Overlap:
    """Submits a module's gradients to the CPU optimizer, and waits for the parameters.

    Args:
        host: the CPU optimizer.
        parameters: unit -> parameter, for all parameters that have offloaded elements.
        speculated_elements: number of elements that get double buffers once a module is attached.

    Attributes:
        host, parameters: see above.
        submitted: unit -> the gradient submitted for the coming step, and its version when it was submitted.
    """

    def __init__(self, host: HostOptimizer, parameters: Mapping[str, LocalParameter], speculated_elements: int):
        self.host, self.parameters, self._speculated_elements = host, parameters, speculated_elements
        self.submitted: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}
        self._hooks: list[Any] = []
        self._awaited: set[str] = set()
        self._attached = self._submits_early = self._in_last_backward = False

    def attach(self, module: nn.Module) -> None:
        """Let submodules wait for their parameters, and submit gradients in the last backward pass."""
        self._attached = True
        # DistributedDataParallel sums gradients only after the hooks that would submit them.
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
        """From now on gradients are not final."""
        self._in_last_backward = False

    def submit(self, local: LocalParameter, grad: torch.Tensor | None, *, again: bool = False) -> None:
        """Submit the offloaded elements of a gradient, unless the host has them and they have not changed since."""
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
        """Submit the gradients that the host does not have, and request the step.

        Args:
            grads: unit -> the gradient in the parameter's shape; units without a gradient do not change.
            norm, hyperparameters, loss_scale: see :meth:`HostOptimizer.step`.
            again: whether to submit all gradients again, because they may have changed without a new version.
        """
        for unit, local in self.parameters.items():
            self.submit(local, grads[unit], again=again)
        self.submitted.clear()
        without = frozenset(unit for unit in self.parameters if grads[unit] is None)
        self.host.step(norm, hyperparameters, loss_scale, without)

    def cancel(self) -> None:
        """Forget the submitted gradients of a step that will not be taken, and restore the parameters' values."""
        if self.submitted:
            self.submitted.clear()
            self.host.cancel()

    def finish(self) -> None:
        """Return when the parameters have the last step's values, for any reader."""
        self.cancel()
        self.host.finish()

    def wait_after_step(self, *, is_watched: bool) -> None:
        """Wait for the parameters that no submodule waits for; for all if a hook may read them after this step."""
        if is_watched or not self._attached:
            self.host.finish()
        else:
            for unit in self.parameters.keys() - self._awaited:
                self.host.wait(unit)

    def close(self) -> None:
        """Remove the hooks, and end the thread.

        This also runs when the process ends, so it does not wait for a device that may not answer.
        """
        for hook in self._hooks:
            hook.remove()
        if self.submitted:
            self.submitted.clear()
            self.host.cancel(wait=False)
        self.host.close()

    def __reduce__(self) -> tuple[Callable[[], Overlap], tuple[()]]:
        return _of_a_copy, ()  # a copied or pickled module has copies of the hooks, but no optimizer

    def before_forward(self, units: list[str], block: bool, *_: object) -> None:
        """A hook: see :func:`~gptpar.offload.module_hooks.watch_readers`."""
        if not self._in_last_backward or not self.submitted.keys().isdisjoint(units):
            self.cancel()  # but not in recomputation: that forward is a part of the backward pass
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
    """Stands for the CPU optimizer of a copied module: there is nothing to wait for."""

    def wait(self, unit: str, *, block: bool = False) -> None: ...

    def finish(self) -> None: ...


def _of_a_copy() -> Overlap:
    """An overlap without optimizer, for the hooks of a copied or unpickled module."""
    return Overlap(cast(HostOptimizer, _NoHost()), {}, 0)
