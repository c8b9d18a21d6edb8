"""AdamW for any module; device and host divide its state and its work."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from gptpar.engine.ranges import Home
from gptpar.offload.buckets import StateSize
from gptpar.offload.device_optimizer import DeviceOptimizer
from gptpar.offload.local_parameters import (
    LocalParameter,
    NormFn,
    is_within,
    local_of,
    problems_of,
    problems_of_hyperparameters,
    sum_over_shards,
    table_of,
    tensors_of,
    version_of,
)
from gptpar.offload.machine import build_host_optimizer, room_for_speculation
from gptpar.offload.overlap import NO_HOST, Overlap
from gptpar.offload.saved_state import follow_parameters, gather_state, place_state, problems_of_state
from gptpar.optim.adamw import ADAMW
from gptpar.optim.grad_norm import square_of
from gptpar.optim.group_ranges import OffloadedPartition
from gptpar.optim.update import Hyperparameters


class TwinFlowAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) with exactly ``offload_ratio`` of the elements updated by the CPU.

    The device updates the first elements, in the order of the parameters. Master weights and moments of the others are
    in host memory. An element gets the same bits in both places (:mod:`gptpar.optim.adam_update`). 16-bit parameters
    get fp32 master weights on both sides. Where parameters are sharded or split over processes (FSDP2, tensor or
    pipeline parallelism), each process updates its own elements.

    :meth:`step` returns when everything is done, unless the module was :meth:`attached <attach>`. A step in which the
    gradient is not finite changes nothing. Parameters without gradient are skipped, as in torch. ``.grad`` stays
    as it is: clipping and a loss scale do not divide it. Learning rate, weight decay, betas and epsilon are those of
    the groups at each step, and ``torch.amp.GradScaler`` may call it. Parameters may be changed from outside by torch's
    in-place operations (not through ``.data``); that is noticed before the next step.

    Args:
        params: parameters or groups, as ``torch.optim.AdamW`` takes them, all on one device; contiguous fp32, bf16 or
            fp16, or all fp64.
        lr, betas, eps, weight_decay: hyperparameters of groups that do not have their own.
        offload_ratio: the twin-flow ratio, 0 to 1: the fraction of the elements that the CPU updates.
        max_norm: the global norm to which gradients are clipped (0: never).
        speculation: whether an attached optimizer updates before the norm is known, into a double buffer of master
            weights and moments: ``on``, ``off``, or ``auto``, as far as host memory allows. It changes no number.
        threads: number of the CPU optimizer's threads; default: see
            :func:`~gptpar.optim.cpu_adam.default_threads`.
        norm_fn: turns this process's sum of squares of the gradient (fp64 scalar, on the device) into that of all
            processes. It is needed where parameters are spread over processes, because these would clip and skip
            differently. DTensors that are all placed alike do without it.

    Attributes:
        elements: number of elements that this process updates.
        offloaded: number of them that the CPU updates.
        attached: whether a module is attached, see :meth:`attach`.
        skipped: 1.0 if the last step changed nothing because the gradient was not finite, else 0.0, on the device.

    Raises:
        ValueError: naming every argument and parameter that does not fit.
        GptparError: host memory does not suffice.
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
            + problems_of_hyperparameters(_hyperparameters_of(given, defaults))
            + _problems_of_arguments(offload_ratio, max_norm, speculation, threads)
        )
        self._parameters: list[LocalParameter] = []
        super().__init__(given, defaults)
        self._norm_fn = norm_fn or sum_over_shards(tensors)
        table, self._parameters = table_of(self.param_groups, offload_ratio)
        self.elements, self.offloaded = table.elements(), table.elements(Home.HOST)
        self._max_norm, self._loss_scale = max_norm, 1.0
        self._device = DeviceOptimizer(self._parameters)
        self.skipped = torch.zeros((), device=self._parameters[0].flat.device)
        self.attached = self._closed = False
        self._overlap = self._make_overlap(table.offloaded(), speculation, threads)
        self._end = weakref.finalize(self, self._overlap.close)
        follow_parameters(set(self._overlap.parameters), self._state)
        self._versions = [version_of(local.parameter) for local in self._parameters]
        self._say_it_has_state()

    def _say_it_has_state(self) -> None:
        """Make ``state`` not empty: torch.distributed.checkpoint steps an optimizer with an empty one to fill it."""
        self.state.update((local.parameter, {}) for local in self._parameters)

    def _make_overlap(self, partitions: Sequence[OffloadedPartition], speculation: str, threads: int | None) -> Overlap:
        """The CPU optimizer of the offloaded elements, without the padding that the table counts."""
        offloaded = {local.unit: local for local in self._parameters if local.offloaded}
        if not offloaded:
            return Overlap(NO_HOST, {}, 0)
        partitions = [one.between(0, offloaded[one.unit].offloaded) for one in partitions]
        updates = (ADAMW,) * len(self.param_groups)
        wide = torch.promote_types(self._parameters[0].flat.dtype, torch.float32)
        room = room_for_speculation(
            StateSize.of(partitions, updates, wide.itemsize),
            speculation,
            asker="TwinFlowAdamW",
            option="speculation='on'",
            remedy="lower offload_ratio, or divide the parameters over more processes",
        )
        host = build_host_optimizer(
            updates,
            partitions,
            {unit: local.flat[local.on_device :] for unit, local in offloaded.items()},
            self.skipped.device,
            max(local.flat.dtype.itemsize for local in offloaded.values()),
            wide,
            clip_grad=self._max_norm,
            threads=threads,
        )
        return Overlap(host, offloaded, room)

    # A step.

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step with the gradients in ``.grad``.

        Args:
            closure: computes gradients and returns the loss, which this method returns.

        Raises:
            RuntimeError: the optimizer is closed, a gradient is sparse, or a parameter was moved to other memory.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        self._overlap.host.finish()
        self._catch_up()
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self._loss_scale = 1.0 if scale is None else float(scale)
        found = {local.unit: local.gradient() for local in self._parameters}
        grads = {unit: grad for unit, grad in found.items() if grad is not None}
        norm = self._norm(list(grads.values()))
        if found_inf is not None:
            norm = norm.where(found_inf.to(norm.device) == 0, float("inf"))
        self.skipped = (~norm.isfinite()).float()
        hyperparameters = self._hyperparameters()
        # GradScaler.unscale_ divides gradients without raising their version; grad_scale is not set then.
        divided = found_inf is not None and scale is None
        self._overlap.step(found, norm, hyperparameters, self._loss_scale, again=divided)
        self._device.step(norm, hyperparameters, self._loss_scale, self._max_norm, grads)
        watched = self._optimizer_step_post_hooks or torch_optimizer._global_optimizer_post_hooks
        self._overlap.wait_after_step(is_watched=bool(watched))
        return loss

    def _norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        square = square_of(grads, self.skipped.device)
        norm = (square if self._norm_fn is None else self._norm_fn(square)).sqrt()
        return norm / torch.full_like(norm, self._loss_scale)  # a number would be inverted and multiplied on GPUs

    def _hyperparameters(self) -> tuple[Hyperparameters, ...]:
        return tuple(ADAMW.of_group(group) for group in self.param_groups)

    def _catch_up(self) -> None:
        """Set the master weights of parameters that were changed from outside."""
        if self._closed:
            raise RuntimeError("TwinFlowAdamW is closed: make a new one and load this one's state_dict() into it.")
        if moved := [p.unit for p in self._parameters if local_of(p.parameter).data_ptr() != p.flat.data_ptr()]:
            where = f"parameters {', '.join(moved)} lie in other memory than when TwinFlowAdamW was made"
            raise RuntimeError(f"{where}: move or convert a module first, then make its optimizer.")
        self._follow_changes()

    def _follow_changes(self) -> None:
        versions = [version_of(local.parameter) for local in self._parameters]
        pairs = zip(self._parameters, self._versions, versions, strict=True)
        changed = {local.unit for local, old, new in pairs if old != new}
        if changed and self._overlap.submitted:  # parameters may have speculated values, which are no master weights
            names = ", ".join(sorted(changed))
            raise RuntimeError(
                f"parameters {names} were changed between last_backward() and step(): change them before, or after "
                "zero_grad(), which forgets the gradients."
            )
        if changed:
            follow_parameters(changed, self._state)
        self._versions = versions

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; also forgets gradients that :meth:`last_backward` has submitted for a step not taken."""
        self._overlap.cancel()
        if not set_to_none:
            self._overlap.host.finish()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the constructor may add groups; afterwards this raises a ``RuntimeError``."""
        if self._parameters:
            raise RuntimeError("TwinFlowAdamW's elements are divided and it takes no further group: make a new one.")
        super().add_param_group(param_group)

    @property
    def homes(self) -> list[tuple[int, int]]:
        """(elements with their state on the device, elements with it on the host) of each parameter on this process."""
        counts = {local.unit: [0, 0] for local in self._parameters}
        for local, at, values in self._state("weights"):
            counts[local.unit][at >= local.on_device] += values.numel()
        return [(on_device, on_host) for on_device, on_host in counts.values()]

    @property
    def num_redone(self) -> int:
        """Number of steps that the host computed twice: it had speculated with other numbers, or another gradient."""
        return self._overlap.host.num_redone

    def finish(self) -> None:
        """Return when the last step is done, so that anyone may read the parameters."""
        self._overlap.finish()

    def close(self) -> None:
        """Finish, and end the thread; afterwards no step can be taken."""
        if not self._closed:
            self.finish()
            self._end()
            self._closed = True

    def __enter__(self) -> TwinFlowAdamW:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    # Overlap.

    def attach(self, module: nn.Module) -> None:
        """Overlap the CPU optimizer's work with the module's: :meth:`step` then returns at once.

        Each submodule waits for its own parameters before its forward pass; ``state_dict`` waits for all parameters.
        Other readers have to call :meth:`finish` first.

        Raises:
            RuntimeError: a module is attached already.
        """
        if self.attached or self._closed:
            raise RuntimeError("TwinFlowAdamW is attached to a module already, or closed.")
        self.attached = True
        self._overlap.attach(module)

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """A context for the last micro-batch's backward pass, after :meth:`attach`: its gradients are final.

        Each gradient is submitted to the CPU optimizer as soon as it is computed. From then until :meth:`step` or
        :meth:`zero_grad`, parameters may hold speculated values; a forward pass or :meth:`finish` restores the old
        values. Gradients that are changed after their submission are submitted again. DistributedDataParallel sums
        gradients later: under it, nothing is submitted before :meth:`step`.
        """
        if not self.attached:
            raise RuntimeError("last_backward() needs attach(module) first.")
        self._overlap.cancel()
        self._catch_up()
        with self._overlap.last_backward(lambda: (self._hyperparameters(), self._loss_scale)):
            yield

    # State.

    def _state(self, kind: str) -> Iterator[tuple[LocalParameter, int, torch.Tensor]]:
        """(parameter, first element, view of the values) of ``weights`` or a moment, in order."""
        for local in self._parameters:
            if local.on_device:
                yield local, 0, self._device.values(local.unit, kind)
        for unit, at, values in self._overlap.host.parts(kind):
            local = self._overlap.parameters[unit]
            yield local, local.on_device + at, values

    def _steps(self) -> dict[str, int]:
        """Unit -> its number of updates; for a parameter without elements on this process, the largest number."""
        known = self._device.steps_taken
        known |= {unit: self._overlap.host.steps_of(unit) for unit in self._overlap.parameters}
        return {local.unit: known.get(local.unit, max(known.values(), default=0)) for local in self._parameters}

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state in the format of ``torch.optim.AdamW``, which can load it; a copy in host memory.

        It does not depend on the ratio. 16-bit parameters have ``master`` (fp32) besides ``step`` and the two moments.
        The state of a DTensor is a DTensor with the same placement.
        """
        self.finish()
        self._follow_changes()
        found, steps = gather_state(self._parameters, self._state), self._steps()
        begun, self.state = self.state, defaultdict(dict)
        for local in (local for local in self._parameters if steps[local.unit]):
            state = {name: local.placed_alike(values) for name, values in found[local.unit].items()}
            self.state[local.parameter] = {"step": torch.tensor(float(steps[local.unit])), **state}
        try:
            return super().state_dict()
        finally:
            self.state = begun

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state and the groups' hyperparameters, saved at any ratio or by ``torch.optim.AdamW``.

        Master weights that are not saved are taken from the parameters.

        Raises:
            ValueError: names everything that does not fit; nothing was changed.
        """
        self.finish()
        groups: list[Mapping[str, Any]] = state_dict["param_groups"]
        places = [place for group in groups for place in group["params"]]
        states = [state_dict["state"].get(place, {}) for place in places]
        _refuse(problems_of_state(self._parameters, states, groups))
        super().load_state_dict({**state_dict, "state": {}})
        of_unit = {local.unit: state for local, state in zip(self._parameters, states, strict=True)}
        place_state(of_unit, self._state)
        steps = {unit: int(state.get("step", 0)) for unit, state in of_unit.items()}
        self._device.steps_taken = steps
        for unit in self._overlap.parameters:
            self._overlap.host.set_steps(unit, steps[unit])
        self._versions = [version_of(local.parameter) for local in self._parameters]
        self._say_it_has_state()


def _hyperparameters_of(given: Sequence[Any], defaults: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Each group's hyperparameters; a parameter that is given by itself has the defaults."""
    return ({**defaults, **item} if isinstance(item, dict) else defaults for item in given)


def _problems_of_arguments(offload_ratio: float, max_norm: float, speculation: str, threads: int | None) -> list[str]:
    """What is wrong with the constructor's own arguments."""
    wanted = {
        f"offload_ratio is {offload_ratio!r}, not between 0 and 1": is_within(offload_ratio, 0, 1),
        f"max_norm is {max_norm!r}, not at least 0": is_within(max_norm, 0),
        f"speculation is {speculation!r}, not auto, off or on": speculation in ("auto", "off", "on"),
        f"threads is {threads!r}, not at least 1": threads is None or is_within(threads, 1),
    }
    return [sentence for sentence, is_met in wanted.items() if not is_met]


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ValueError("TwinFlowAdamW: " + "; ".join(problems))
