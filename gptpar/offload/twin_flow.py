"""AdamW for any module, whose state and work are divided between the device and the host's memory and cores."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

from gptpar.offload.device_optimizer import DeviceOptimizer
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.offload.local_parts import (
    LocalPart,
    NormFn,
    divide_parts,
    local_of,
    problems_of,
    problems_of_rates,
    sum_over_shards,
    tensors_of,
    version_of,
)
from gptpar.offload.module_hooks import watch_gradient, watch_readers
from gptpar.offload.placement import build_host_optimizer, room_beside
from gptpar.offload.saved_state import follow_parameters, gather_state, place_state, problems_of_state
from gptpar.optim.adam_update import Hyperparameters
from gptpar.optim.grad_norm import square_of
from gptpar.optim.spans import HostPiece, Run


class TwinFlowAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with exactly ``offload_ratio`` of the elements updated by the CPU.

    The first elements, in the order of the parameters, are the device's. Masters and moments of the others are in host
    memory. Where an element is updated changes no bit of it (:mod:`gptpar.optim.adam_update`). 16-bit parameters get
    fp32 masters on both sides. Of parameters that are divided over processes (FSDP2, tensor or pipeline parallelism)
    each process updates what it holds.

    :meth:`step` returns when everything is done, unless the module was :meth:`attached <attach>`. A step in which the
    gradient is not finite changes nothing. Parameters without gradient are passed over, as torch does. ``.grad`` stays
    as it is: clipping and a loss scale do not divide it. Learning rate, weight decay, betas and epsilon are those of
    the groups at each step, and ``torch.amp.GradScaler`` may call it. Parameters may be changed from outside by torch's
    in-place operations (not through ``.data``); that is noticed before the next step.

    Args:
        params: as of ``torch.optim.AdamW``, all on one device; contiguous fp32, bf16 or fp16, or all fp64.
        lr, betas, eps, weight_decay: of groups that do not say theirs.
        offload_ratio: the host's share of the elements, 0 to 1.
        max_norm: all gradients are clipped to this global norm (0: never).
        speculation: whether an attached optimizer updates before the norm is known, into memory as large as masters
            and moments: ``on``, ``off``, or ``auto``, as far as host memory allows. It changes no number.
        threads: of the CPU optimizer; default: the cores of this process but two.
        norm_fn: turns this process's sum of squares of the gradient (fp64 scalar, on the device) into that of all
            processes. To be given where parameters are divided over processes; DTensors that are all divided alike
            bring it along. Without it, processes would clip and skip differently.

    Attributes:
        elements, offloaded: of this process, and of those the host's.
        attached: whether to a module, see :meth:`attach`.
        skipped: 1.0 if the last step changed nothing because the gradient was not finite, else 0.0, on the device.

    Raises:
        ValueError: naming every argument and parameter that does not fit.
        GptparError: the host's memory does not suffice.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then sets grad_scale and found_inf before step()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        offload_ratio: float = 1.0,
        max_norm: float = 0.0,
        speculation: str = "auto",
        threads: int | None = None,
        norm_fn: NormFn | None = None,
    ):
        given, tensors = tensors_of(params)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        _refuse(
            problems_of(tensors)
            + problems_of_rates({**defaults, **item} if isinstance(item, dict) else defaults for item in given)
            + ([] if 0 <= offload_ratio <= 1 else [f"offload_ratio is {offload_ratio}, not between 0 and 1"])
            + ([] if max_norm >= 0 else [f"max_norm is {max_norm}, not at least 0"])
            + ([] if speculation in ("auto", "off", "on") else [f"speculation is {speculation!r}, not auto, off or on"])
            + ([] if threads is None or threads >= 1 else [f"threads is {threads}, not at least 1"])
        )
        self._host: HostOptimizer | None = None
        self._parts: list[LocalPart] = []
        super().__init__(given, defaults)
        self._norm_fn = norm_fn or sum_over_shards(tensors)
        self._parts = divide_parts(self.param_groups, offload_ratio)
        self._max_norm = max_norm
        self.elements = sum(part.flat.numel() for part in self._parts)
        self.offloaded = sum(part.offloaded for part in self._parts)
        on_device = [part for part in self._parts if part.kept]
        self._device = DeviceOptimizer(
            {part.unit: part.flat[: part.kept] for part in on_device}, {part.unit: part.group for part in on_device}
        )
        self._on_host = {part.unit: part for part in self._parts if part.offloaded}
        self._wide = torch.promote_types(self._parts[0].flat.dtype, torch.float32)
        self.skipped = torch.zeros((), device=self._parts[0].flat.device)
        self._offered: dict[str, tuple[torch.Tensor, tuple[int, int]]] = {}
        self._hooks: list[Any] = []
        self.attached = self._streams = self._in_last_backward = self._closed = False
        self._awaited: set[str] = set()
        self._loss_scale = 1.0
        if self._on_host:
            self._room = room_beside(
                self.offloaded,
                self._wide,
                speculation,
                asker="TwinFlowAdamW",
                option="speculation='on'",
                remedy="lower offload_ratio, or divide the parameters over more processes",
            )
            self._host = self._make_host(threads)
            follow_parameters(set(self._on_host), self._state)
            self._end = weakref.finalize(self, self._host.close)
        self._versions = [version_of(part.parameter) for part in self._parts]
        self._say_it_has_state()

    def _say_it_has_state(self) -> None:
        """torch.distributed.checkpoint steps optimizers whose ``state`` is empty, to see what they will have there."""
        self.state.update((part.parameter, {}) for part in self._parts)

    def _make_host(self, threads: int | None) -> HostOptimizer:
        parts = self._on_host.values()
        host = build_host_optimizer(
            [HostPiece(p.unit, p.offloaded, (Run(0, p.offloaded, p.group, False, True),)) for p in parts],
            self.skipped.device,
            max(part.flat.dtype.itemsize for part in parts),
            self._wide,
            clip_grad=self._max_norm,
            threads=threads,
        )
        host.attach({part.unit: part.flat[part.kept :] for part in parts})
        return host

    # A step.

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step with the gradients in ``.grad``.

        Args:
            closure: computes loss and gradients; its result is returned.

        Raises:
            RuntimeError: the optimizer is closed, a gradient is sparse, or a parameter was moved to other memory.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        if self._host is not None:
            self._host.finish()
        self._catch_up()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self._loss_scale = 1.0 if scale is None else float(scale)
        found = {part.unit: part.gradient() for part in self._parts}
        grads = {unit: grad.reshape(-1) for unit, grad in found.items() if grad is not None}
        norm = self._norm(list(grads.values()))
        if found_inf is not None:
            norm = norm.where(found_inf.to(norm.device) == 0, float("inf"))
        self.skipped = (~norm.isfinite()).float()
        rates = self._rates()
        if self._host is not None:
            # GradScaler.unscale_ divides gradients without raising their version; grad_scale is not set then.
            divided = found_inf is not None and scale is None
            for unit, part in self._on_host.items():
                self._offer(part, found[unit], again=divided)
            self._offered.clear()
            self._host.step(norm, rates, self._loss_scale, frozenset(self._on_host) - grads.keys())
        on_device = {part.unit: grads[part.unit][: part.kept] for part in self._parts if part.unit in grads}
        self._device.step(norm, rates, self._loss_scale, self._max_norm, on_device)
        self._wait_for_unattached()
        return loss

    def _norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        square = square_of(grads, self.skipped.device)
        norm = (square if self._norm_fn is None else self._norm_fn(square)).sqrt()
        return norm / torch.full_like(norm, self._loss_scale)  # a number would be inverted and multiplied on GPUs

    def _rates(self) -> tuple[Hyperparameters, ...]:
        numbers = ((g["lr"], *g["betas"], g["eps"], g["weight_decay"]) for g in self.param_groups)
        return tuple(Hyperparameters(*map(float, group)) for group in numbers)

    def _offer(self, part: LocalPart, grad: torch.Tensor | None, *, again: bool = False) -> None:
        """Give the host its part of a gradient, unless it has it and nobody has changed it since."""
        assert self._host is not None
        if grad is None:
            return
        version = version_of(part.parameter.grad)
        before, old = self._offered.get(part.unit, (None, version))
        if again or before is None or before.data_ptr() != grad.data_ptr() or version != old:
            self._offered[part.unit] = grad, version
            self._host.submit_gradient(part.unit, grad.reshape(-1)[part.kept :])

    def _wait_for_unattached(self) -> None:
        """Until the parameters that nobody waits for are finished, or all if somebody will look at them now."""
        watched = self._optimizer_step_post_hooks or torch_optimizer._global_optimizer_post_hooks
        if self._host is not None and (watched or not self.attached):
            self._host.finish()
        elif self._host is not None:
            for unit in self._on_host.keys() - self._awaited:
                self._host.wait(unit)

    def _catch_up(self) -> None:
        """Let masters follow parameters that were changed from outside."""
        if self._closed:
            raise RuntimeError("TwinFlowAdamW is closed: make a new one and load this one's state_dict() into it.")
        if moved := [p.unit for p in self._parts if local_of(p.parameter).data_ptr() != p.flat.data_ptr()]:
            where = f"parameters {', '.join(moved)} lie in other memory than when TwinFlowAdamW was made"
            raise RuntimeError(f"{where}: move or convert a module first, then make its optimizer.")
        versions = [version_of(part.parameter) for part in self._parts]
        changed = {p.unit for p, old, new in zip(self._parts, self._versions, versions, strict=True) if old != new}
        if changed and not self._offered:  # otherwise parameters may hold coming values
            follow_parameters(changed, self._state)
        self._versions = versions

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what :meth:`last_backward` has sent of a step that was not taken is forgotten."""
        self._cancel()
        if self._host is not None and not set_to_none:
            self._host.finish()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For the constructor; afterwards a ``RuntimeError``."""
        if self._parts:
            raise RuntimeError("TwinFlowAdamW's elements are divided and it takes no further group: make a new one.")
        super().add_param_group(param_group)

    @property
    def homes(self) -> list[tuple[int, int]]:
        """For each parameter how many of this process's elements have their state on the device, and on the host."""
        counts = {part.unit: [0, 0] for part in self._parts}
        for part, at, values in self._state("weights"):
            counts[part.unit][at >= part.kept] += values.numel()
        return [(on_device, on_host) for on_device, on_host in counts.values()]

    @property
    def num_redone(self) -> int:
        """Steps that the host computed twice, because what it had assumed about clipping was wrong."""
        return 0 if self._host is None else self._host.num_redone

    def finish(self) -> None:
        """Return when the last step is done, so that anyone may read the parameters."""
        self._cancel()
        if self._host is not None:
            self._host.finish()

    def close(self) -> None:
        """Finish and end the thread; afterwards there are no steps."""
        if not self._closed:
            self.finish()
            for hook in self._hooks:
                hook.remove()
            if self._host is not None:
                self._end()
            self._closed = True

    def __enter__(self) -> TwinFlowAdamW:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    # Overlap.

    def attach(self, module: nn.Module) -> None:
        """Overlap the host's work with the module's: :meth:`step` then returns at once.

        Before its forward each module inside waits for its own parameters, and ``state_dict`` of modules for all.
        Whoever reads them otherwise calls :meth:`finish` first.

        Raises:
            RuntimeError: a module is attached already.
        """
        if self.attached or self._closed:
            raise RuntimeError("TwinFlowAdamW is attached to a module already, or closed.")
        self.attached = True
        self._streams = not any(isinstance(part, DistributedDataParallel) for part in module.modules())
        if self._host is None:
            return
        if self._streams:
            self._host.add_double_buffers(self._room)
        unit_of = {id(part.parameter): unit for unit, part in self._on_host.items()}
        for units, hooks in watch_readers(module, unit_of, partial(_before_forward, self), partial(_finish, self)):
            self._awaited.update(units)
            self._hooks += hooks
        for part in self._on_host.values():
            self._hooks += watch_gradient(part.parameter, partial(_stream, self, part))

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Gradients of backward passes done inside are final, and go to the host as they come.

        It is for the last micro-batch, after :meth:`attach`. Until :meth:`step` or :meth:`zero_grad` parameters may
        hold coming values; a forward pass or :meth:`finish` before that gives them the old ones back. Gradients that
        are changed afterwards all the same are sent once more. Under DistributedDataParallel, which sums gradients
        later, nothing is sent ahead.
        """
        if not self.attached:
            raise RuntimeError("last_backward() needs attach(module) first.")
        self._cancel()
        self._catch_up()
        if self._host is not None and self._streams:
            self._host.expect_step(self._rates(), self._loss_scale)
            self._in_last_backward = True
        try:
            yield
        finally:
            self._in_last_backward = False

    def _cancel(self) -> None:
        if self._offered and self._host is not None:
            self._offered.clear()
            self._host.cancel()

    # State.

    def _state(self, kind: str) -> Iterator[tuple[LocalPart, int, torch.Tensor]]:
        """(parameter, first element, live values) of ``weights``, ``exp_avg`` or ``exp_avg_sq``, in order."""
        for part in self._parts:
            if part.kept:
                yield part, 0, self._device.values(part.unit, kind)
        for unit, at, values in self._host.parts(kind) if self._host is not None else ():
            yield self._on_host[unit], self._on_host[unit].kept + at, values

    def _steps(self) -> dict[str, int]:
        """Updates of each parameter; of one without elements here, as many as any has had."""
        known = self._device.steps_taken
        if self._host is not None:
            known |= {unit: self._host.steps_of(unit) for unit in self._on_host}
        return {part.unit: known.get(part.unit, max(known.values(), default=0)) for part in self._parts}

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """As ``torch.optim.AdamW``'s, whatever the ratio, which can load it; a copy in host memory.

        16-bit parameters have ``master`` (fp32) besides ``step``, ``exp_avg`` and ``exp_avg_sq``. The state of
        DTensors is DTensors, divided as they are.
        """
        self.finish()
        found, steps = gather_state(self._parts, self._state), self._steps()
        begun, self.state = self.state, defaultdict(dict)
        for part in (part for part in self._parts if steps[part.unit]):
            state = {name: part.divided_alike(values) for name, values in found[part.unit].items()}
            self.state[part.parameter] = {"step": torch.tensor(float(steps[part.unit])), **state}
        try:
            return super().state_dict()
        finally:
            self.state = begun

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state and the groups' numbers of any ratio, or of ``torch.optim.AdamW``.

        Masters that are not in it are taken from the parameters.

        Raises:
            ValueError: naming everything that does not fit; nothing is changed then.
        """
        self.finish()
        groups: list[Mapping[str, Any]] = state_dict["param_groups"]
        places = [place for group in groups for place in group["params"]]
        states = [state_dict["state"].get(place, {}) for place in places]
        _refuse(problems_of_state(self._parts, states, groups))
        super().load_state_dict({**state_dict, "state": {}})
        of_unit = {part.unit: state for part, state in zip(self._parts, states, strict=True)}
        place_state(of_unit, self._state)
        steps = {unit: int(state.get("step", 0)) for unit, state in of_unit.items()}
        self._device.steps_taken = steps
        for unit in self._on_host:
            self._host.set_steps(unit, steps[unit])  # type: ignore[union-attr]
        self._versions = [version_of(part.parameter) for part in self._parts]
        self._say_it_has_state()


def _before_forward(optimizer: TwinFlowAdamW, units: list[str], block: bool, *_: object) -> None:
    assert optimizer._host is not None
    if not optimizer._in_last_backward or not optimizer._offered.keys().isdisjoint(units):
        optimizer._cancel()  # unless it is a block that is computed again in the backward
    for unit in units:
        optimizer._host.wait(unit, block=block)


def _finish(optimizer: TwinFlowAdamW, *_: object) -> None:
    optimizer.finish()


def _stream(optimizer: TwinFlowAdamW, part: LocalPart, *_: object) -> None:
    if optimizer._in_last_backward and optimizer._host is not None:
        if part.unit in optimizer._offered and optimizer._room:
            which = f"parameter {part.unit} got a second gradient in last_backward()"
            raise RuntimeError(f"{which}: open it for the last backward pass alone, or choose speculation='off'.")
        optimizer._host.wait(part.unit)
        optimizer._offer(part, part.gradient())


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("TwinFlowAdamW: " + "; ".join(problems))
