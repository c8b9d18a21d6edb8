"""Adds each parameter's gradient to its unit's flat sum as soon as autograd produces it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gptpar.engine.backward_passes import BACKWARD_PASSES
from gptpar.engine.reducer import GradientReducer
from gptpar.engine.units import Unit
from gptpar.errors import GptparError
from gptpar.kernels.addition import add_each

ALIGNED_BYTES = 256
"""A product may choose another kernel, whose bits differ, for a result that is aligned less than new memory is."""


class GradientCollector:
    """Adds gradients to their units' sums, and hands complete units on to the reducer.

    Between processes, the collector passes units to the reducer in the reverse of the forward order, even if they
    complete in another order. Processes match collectives by their order alone: if autograd's order differed on one
    process, the collectives would hang or add up different units.

    A unit is complete when each of its parameters has got a gradient in a backward pass. In a user's module a parameter
    may get several gradients, from nested backward passes (reentrant recomputation). The first pass counts them, and
    hands these units on at its end.

    A CPU optimizer that speculates may change a unit's parameters as soon as the reducer has the unit. If a backward
    pass reads a parameter after its gradient (:meth:`reads_late`), later passes hand that unit on only at their end.
    Once all processes know that it is read so late (:meth:`hand_on_last`), it comes last in the fixed order, and no
    other unit waits for it.

    Args:
        virtual_stages: names of the units of each of this process's virtual stages, in forward order.
        done: called with (unit's name, whether its gradient is final in this process) when a backward pass has
            completed the unit's gradients, before they are reduced.
        counts_arrivals: whether backward passes may be nested.
        fixed_order: whether all passes hand units on in the fixed order; if not, only the first pass does, and later
            ones hand on each unit when it is complete.

    Attributes:
        memory: of the units' sums.
        reducer: as given.
        in_pass: whether a backward pass is running.
        in_last_forward: whether the running forward pass is the step's last of its stage.
        late: parameters that got a gradient in this step after their unit had been handed on: it was not added.
        begin_unannounced: begins a backward pass that nobody has announced, at its first gradient; ``None``: such
            passes are refused.
    """

    def __init__(
        self,
        virtual_stages: Sequence[Sequence[str]],
        reducer: GradientReducer,
        done: Callable[[str, bool], None],
        *,
        counts_arrivals: bool = False,
        fixed_order: bool = True,
    ):
        self.memory, self.reducer, self._done = reducer.memory, reducer, done
        units = self.memory.table.units
        self._counts_arrivals, self._fixed_order, self._has_learned = counts_arrivals, fixed_order, False
        self._units = {unit.name: unit for unit in units}
        self._unit_of = {name: unit for unit in units for name in unit.params}
        self._expected = {unit.name: len(unit.params) for unit in units}
        self._arrivals: dict[str, int] = {}
        self._outer_task: int | None = None
        self.in_pass = False
        self.in_last_forward = False
        self.begin_unannounced: Callable[[], None] | None = None
        self._factor = 1.0
        self.late: set[str] = set()
        self._arrived: set[str] = set()
        self._arrived_before: set[str] = set()  # in earlier passes, whose sums have been handed on
        self._fresh: dict[str, dict[str, torch.Tensor]] = {}
        self._missing: dict[str, int] = {}
        self._waiting: dict[str, tuple[Unit, bool]] = {}
        self._handed_on: set[str] = set()
        self._hooks: list[RemovableHandle] = []
        self._nested: set[str] = set()
        self._placed: set[str] = set()  # parameters whose place in the sum the running pass has given away
        self._here: set[str] = set()  # parameters whose gradient has come in the running pass
        self._read_late: set[str] = set()
        self._handed_on_last: frozenset[str] = frozenset()
        self._virtual_stages = [list(dict.fromkeys(names)) for names in virtual_stages]
        # Backward passes of a micro-batch go from the last virtual stage to the first.
        last_first = reversed(list(enumerate(self._virtual_stages)))
        self._last_stage = {name: stage for stage, names in last_first for name in names}

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take the gradients of these parameters, by global name, and leave ``.grad`` empty.

        A gradient from another engine's backward pass is dropped: that engine's loss led through this module.
        """
        for name, parameter in parameters.items():
            parameter.grad = None  # of an earlier backward pass: autograd would add to it
            take = partial(_take_for, weakref.ref(self), name, self._unit_of[name])
            self._hooks.append(parameter.register_post_accumulate_grad_hook(take))

    def watch_added(self, name: str, scalar: torch.Tensor) -> None:
        """Count a parameter, by global name, when its scalar gets a gradient: its own is in the sum by then."""
        take = partial(_take_for, weakref.ref(self), name, self._unit_of[name], is_added=True)
        self._hooks.append(scalar.register_post_accumulate_grad_hook(take))

    def unwatch(self) -> None:
        """Leave gradients to autograd, as it was before :meth:`watch`."""
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self, num_micro_batches: int) -> None:
        """Begin a step, and forget a backward pass that ended in an error."""
        self.reducer.begin()
        # A unit that two virtual stages share gets a second gradient even in a step of one micro-batch.
        shares_units = sum(map(len, self._virtual_stages)) > len(self._last_stage)
        self.memory.begin(num_micro_batches + shares_units)
        self.in_pass = False
        arrived = self._arrived, self._arrived_before, self.late
        for forgotten in (*arrived, self._fresh, self._missing, self._waiting, self._handed_on):
            forgotten.clear()

    def reopen(self, final: Mapping[str, Sequence[tuple[int, torch.Tensor]]]) -> None:
        """Begin the sums anew within the step; parameters that have had a gradient keep counting as arrived.

        Args:
            final: see :meth:`GradientReducer.reopen <gptpar.engine.reducer.GradientReducer.reopen>`.
        """
        self.memory.single = False
        self.reducer.reopen(final)
        self._arrived_before |= self._arrived
        self._arrived.clear()

    def expect(self, unit: str, count: int) -> None:
        """Expect gradients of this many of a unit's parameters in the coming passes."""
        self._expected[unit] = count

    def begin_backward(
        self, virtual_stage: int, *, last: bool, factor: float = 1.0, ends_together: bool = False
    ) -> None:
        """Begin a backward pass of a virtual stage.

        Args:
            last: whether it is the step's last for that stage.
            factor: of the pass's gradients in the sums.
            ends_together: hand all units on at the end of the pass, because nobody records late reads.
        """
        names, self._factor = self._virtual_stages[virtual_stage], factor
        waiting = names if ends_together else self._read_late
        self._missing = {name: sys.maxsize if name in waiting else self._expected[name] for name in names}
        self._handed_on.clear()
        self._here.clear()
        self._placed.clear()
        self._outer_task, self.in_pass = None, True
        self._arrivals = dict.fromkeys(names, 0)
        last_first = names[::-1]
        for name in sorted(last_first, key=self._handed_on_last.__contains__):
            final = last and self._last_stage[name] == virtual_stage
            if final or name not in self.memory.kept_whole:
                self._waiting[name] = self._units[name], final

    def enter_backward(self, task: int) -> None:
        """Note that autograd runs the pass as graph task number ``task``; a nested pass has another number."""
        self._outer_task = task

    def place_of(self, name: str) -> torch.Tensor | None:
        """The place of a parameter, by global name, in its unit's sum, for a product that writes the gradient there.

        A place is given once a pass, and only while it holds no gradient; ``None``: the gradient needs memory of its
        own. If autograd passes on another tensor, such as a sum of two gradients, :meth:`_add` copies it to the place.
        """
        unit = self._unit_of[name]
        if not self.in_pass or unit.name in self._handed_on or name in self._arrived or name in self._placed:
            return None
        self._placed.add(name)
        place = self.memory.views_of(unit)[name]
        is_plain = place.dtype == self.memory.arriving_dtype(unit) and place.is_contiguous()
        is_aligned = place.storage_offset() * place.itemsize % ALIGNED_BYTES == 0
        return place if is_plain and is_aligned else None

    def reads_late(self, parameter: str) -> bool:
        """Whether a parameter that is read now has its gradient already; later passes then hand its unit on last."""
        is_late = parameter in self._here
        if is_late:
            self._read_late.add(self._unit_of[parameter].name)
        return is_late

    @property
    def arrived(self) -> set[str]:
        """Parameters that have got a gradient in this step."""
        return self._arrived | self._arrived_before

    def count(self, name: str) -> None:
        """Count a parameter whose gradient was put into its unit's sum from outside."""
        self._arrived.add(name)

    @property
    def late_units(self) -> list[bool]:
        """For each unit whether a pass has read its parameters after their gradient, on this process."""
        return [name in self._read_late for name in self._units]

    def hand_on_last(self, are_late: Sequence[bool]) -> None:
        """In later passes, hand these units on after the others.

        Args:
            are_late: for each unit, the same on all processes: whether any process :attr:`reads it late <late_units>`.
        """
        self._handed_on_last = frozenset(name for name, is_late in zip(self._units, are_late, strict=True) if is_late)
        self._read_late |= self._handed_on_last

    def leave_backward(self) -> None:
        """Leave the pass, which may have ended in an error."""
        self.in_pass = False

    @torch.no_grad()
    def end_backward(self) -> None:
        """End the pass: a parameter without a gradient counts as zero."""
        self.leave_backward()
        for unit in list(self._fresh):
            self._add(self._units[unit])
        while self._waiting:
            self._hand_on(next(iter(self._waiting)))
        if self._counts_arrivals:
            for name, arrivals in self._arrivals.items():
                self._expected[name] = max(arrivals, self._expected[name])
            self._has_learned = True

    def _take(self, name: str, unit: Unit, parameter: torch.Tensor, *, is_added: bool = False) -> None:
        grad = parameter.grad
        if grad is None:  # a compiled block reports its parameters that have no gradient, too
            return
        parameter.grad = None
        if grad.layout != torch.strided:  # of an embedding with sparse=True
            grad = grad.to_dense()
        if not self.in_pass:
            if BACKWARD_PASSES.belongs_to_engine:
                return  # another engine's loss led through this module
            if self.begin_unannounced is None:
                raise GptparError(
                    f"{name} got a gradient outside of engine.train_batch(), which has to begin every backward pass: "
                    "processes would not sum it. It was dropped."
                )
            if grad.requires_grad:
                raise GptparError(
                    "loss.backward(create_graph=True): gradients are taken out of autograd as they come, so that no "
                    "graph of them can be kept. Gradients with respect to inputs (torch.autograd.grad) can have one."
                )
            self.begin_unannounced()
        self._missing[unit.name] -= 1
        self._here.add(name)
        if self._counts_arrivals:
            self._arrivals[unit.name] += 1
            if torch._C._current_graph_task_id() != self._outer_task and unit.name not in self._nested:
                self._nested.add(unit.name)
                self._missing[unit.name] = sys.maxsize  # the unit waits for the end: more gradients may come
        if unit.name in self._handed_on:
            self.late.add(name)
            return
        fresh = self._fresh.setdefault(unit.name, {})
        if is_added:
            self._arrived.add(name)
        else:
            fresh[name] = fresh[name] + grad if name in fresh else grad
        if self._missing[unit.name] <= 0:
            self._complete(unit)

    @torch.no_grad()  # once for all that follows: each entry costs the host as much as a launch
    def _complete(self, unit: Unit) -> None:
        """Add a complete unit's gradients, and hand on the unit and what it has kept waiting."""
        self._add(unit)
        if unit.name not in self._waiting:
            self._done(unit.name, False)
        in_order = self._fixed_order or not self._has_learned
        waiting = self._waiting if in_order else {unit.name} & self._waiting.keys()
        for name in list(waiting):
            if self._missing[name] > 0:
                break
            self._hand_on(name)

    def _add(self, unit: Unit) -> None:
        """Add a unit's gradients to its sum in few launches: a launch for each would keep the host busy."""
        fresh, views = self._fresh.pop(unit.name), self.memory.views_of(unit)
        known, first = ([name for name in fresh if (name in self._arrived) == is_known] for is_known in (True, False))
        if known:
            add_each([views[name] for name in known], [fresh[name] for name in known], self._factor)
        if first:
            pairs = ((views[name], fresh[name]) for name in first)
            if elsewhere := [(place, grad) for place, grad in pairs if place.data_ptr() != grad.data_ptr()]:
                places, grads = zip(*elsewhere, strict=True)
                torch._foreach_copy_(places, grads)
            if self._factor != 1:
                torch._foreach_mul_([views[name] for name in first], self._factor)
        self._arrived.update(first)

    def _hand_on(self, which: str) -> None:
        unit, last = self._waiting.pop(which)
        total = self.memory.take(unit)
        for name, param in unit.params.items():
            if name not in self._arrived:
                total[param.start : param.stop].zero_()
        if unit.name not in self.memory.kept_whole:
            self._arrived_before |= self._arrived & unit.params.keys()
            self._arrived.difference_update(unit.params)
        self._handed_on.add(unit.name)
        self._done(unit.name, last)
        self.reducer.reduce(unit, total, last=last)


def _take_for(collector: weakref.ref[GradientCollector], *arguments: Any, is_added: bool = False) -> None:
    """A parameter's hook, which refers weakly to its collector.

    Autograd holds hooks where Python's garbage collector does not look: one that referred to the collector would keep a
    dropped engine for ever.
    """
    if (alive := collector()) is not None:
        alive._take(*arguments, is_added=is_added)
