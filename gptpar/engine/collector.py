"""Each parameter's gradient as autograd produces it, added to its unit's flat sum."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.reducer import GradientReducer
from gptpar.engine.units import Unit


class GradientCollector:
    """Hands complete units on to the reducer.

    Units are handed on in a fixed order, the reverse of the forward pass, even if they complete in another one:
    processes match collectives by their order alone, and one whose autograd differed would hang or add up the wrong
    units.

    Args:
        units: in forward order.
        chunks: names of the units of each of this process's virtual stages, in forward order.
        done: called with a unit's name when its gradients of a backward pass are complete and being reduced.

    Attributes:
        in_last_forward: whether the forward pass at work is the step's last of its stage.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        chunks: Sequence[Sequence[str]],
        memory: GradientMemory,
        reducer: GradientReducer,
        done: Callable[[str], None],
    ):
        self._memory, self._reducer, self._done = memory, reducer, done
        self._units = {unit.name: unit for unit in units}
        self._chunks = [list(dict.fromkeys(names)) for names in chunks]
        self._unit_of = {name: unit for unit in units for name in unit.params}
        self.in_last_forward = False
        self._arrived: set[str] = set()
        self._fresh: dict[str, dict[str, torch.Tensor]] = {}
        self._missing: dict[str, int] = {}
        self._waiting: deque[tuple[Unit, bool]] = deque()

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Take these parameters' gradients, by global name; their ``.grad`` is always empty afterwards."""
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._take(name, p))

    def begin(self) -> None:
        """A step begins."""
        self._arrived.clear()

    def begin_backward(self, chunk: int, *, last: bool) -> None:
        """A backward pass of a virtual stage begins; ``last``: it is the step's last for that stage."""
        self._missing = {name: len(self._units[name].params) for name in self._chunks[chunk]}
        if last or not self._memory.keeps_all:
            self._waiting.extend((self._units[name], last) for name in reversed(self._chunks[chunk]))

    def end_backward(self) -> None:
        """The pass is over: what got no gradient counts as zero."""
        for unit in list(self._fresh):
            self._add(self._units[unit])
        while self._waiting:
            self._hand_on(*self._waiting.popleft())

    def _take(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        unit = self._unit_of[name]
        self._fresh.setdefault(unit.name, {})[name] = parameter.grad.detach()
        parameter.grad = None
        self._missing[unit.name] -= 1
        if not self._missing[unit.name]:
            self._add(unit)
        while self._waiting and not self._missing[self._waiting[0][0].name]:
            self._hand_on(*self._waiting.popleft())

    @torch.no_grad()
    def _add(self, unit: Unit) -> None:
        """Add a unit's gradients to its sum, together: launched one by one they would keep the host busy."""
        fresh, total = self._fresh.pop(unit.name), self._memory.sum_of(unit)
        views = {name: total[(p := unit.params[name]).start : p.stop].view(p.shape) for name in fresh}
        known, first = ([name for name in fresh if (name in self._arrived) == is_known] for is_known in (True, False))
        if known:
            torch._foreach_add_([views[name] for name in known], [fresh[name] for name in known])
        if first:
            torch._foreach_copy_([views[name] for name in first], [fresh[name] for name in first])
        self._arrived.update(first)

    @torch.no_grad()
    def _hand_on(self, unit: Unit, last: bool) -> None:
        total = self._memory.sum_of(unit)
        for name, param in unit.params.items():
            if name not in self._arrived:
                total[param.start : param.stop].zero_()
        if not self._memory.keeps_all:
            self._arrived.difference_update(unit.params)
        self._reducer.reduce(unit, total, last=last)
        self._done(unit.name)
