"""Overlaps TwinFlowAdamW's CPU optimizer with the passes of a module.

Without an attached module everything happens in ``step()``. With one, each gradient is submitted when it becomes final
in the last backward pass, and each submodule waits for its own parameters before its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.local_parameters import LocalParameter, version_of
from gptpar.optim.update import Hyperparameters

READ_INSIDE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that read their submodules' parameters without calling the submodules."""


class _NoHost:
    """Stands for the CPU optimizer where it has no elements, and in a copied module: there is nothing to wait for."""

    num_redone = 0

    def _nothing(self, *args: object, **kwargs: object) -> tuple[()]:
        return ()

    add_double_buffers = expect_step = step = wait = finish = parts = close = _nothing


NO_HOST = cast(HostOptimizer, _NoHost())


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
        for inner in module.modules():
            gathers = _gathers(inner)
            read = inner.parameters() if isinstance(inner, READ_INSIDE) else _read_by(inner, gathers)
            if units := [unit_of[id(p)] for p in read if id(p) in unit_of]:
                self._awaited.update(units)
                before = partial(self.before_forward, units, gathers)
                self._hooks.append(inner.register_forward_pre_hook(before, prepend=True))
                self._hooks.append(inner.register_state_dict_pre_hook(self.before_state_dict))
        for local in self.parameters.values():
            if local.parameter.requires_grad:
                submit = partial(self._gradient_is_final, local)
                self._hooks.append(local.parameter.register_post_accumulate_grad_hook(submit))

    @contextmanager
    def last_backward(self, expected: Callable[[], tuple[tuple[Hyperparameters, ...], float]]) -> Iterator[None]:
        """A context in which gradients are final: they are submitted at once, if an attached module permits it.

        Args:
            expected: returns the coming step's hyperparameters and loss scale; see :meth:`HostOptimizer.expect_step`.
        """
        if self._submits_early:
            self._in_last_backward = True
            self.host.expect_step(*expected())
        try:
            yield
        finally:
            self._in_last_backward = False

    def submit(self, local: LocalParameter, grad: torch.Tensor | None, *, again: bool = False) -> None:
        """Submit the offloaded elements of a flat gradient, unless the host has them as they are now."""
        if grad is None:
            return
        version = version_of(local.parameter.grad)
        before, old = self.submitted.get(local.unit, (None, version))
        if again or before is None or before.data_ptr() != grad.data_ptr() or version != old:
            self.submitted[local.unit] = grad, version
            self.host.submit_gradient(local.unit, grad[local.on_device :])

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
            grads: unit -> the gradient, flat; units without a gradient do not change.
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
        """A hook: a submodule is about to read the parameters of these units.

        Args:
            block: whether another stream than the current one reads them.
        """
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


def _of_a_copy() -> Overlap:
    """An overlap without optimizer, for the hooks of a copied or unpickled module."""
    return Overlap(NO_HOST, {}, 0)


def _gathers(module: nn.Module) -> bool:
    """Whether a module is one of FSDP2's: it gathers its parameters on its own streams, before its forward."""
    return hasattr(module, "unshard")


def _read_by(module: nn.Module, gathers: bool) -> list[nn.Parameter]:
    """A module's own parameters; if it gathers, also those of modules inside it that do not gather themselves."""
    found = list(module.parameters(recurse=False))
    for inner in module.children():
        if gathers and not _gathers(inner):
            found += _read_by(inner, gathers)
    return found
