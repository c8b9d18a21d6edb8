"""An elementwise optimizer over a device's flat vectors, which writes the model's parameters in the same pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from gptpar.optim.elementwise import DeviceStep, ElementwiseOptimizer, UpdateVectors
from gptpar.optim.group_ranges import ALIGNMENT, GPT_FAMILIES, Family, GroupRange, group_ranges_between
from gptpar.optim.state_layout import StateLayout
from gptpar.optim.torch_kernels import make_device_kernel
from gptpar.optim.update import Hyperparameters, Update
from gptpar.system.state_guard import StateGuard

ContiguousRange = tuple[int, int, torch.Tensor | None]
"""(start, stop, model parameters to write); ``None``: the model parameters are the master weights themselves."""


@dataclass(frozen=True)
class FlatState:
    """The memory that one process's update reads and writes.

    Attributes:
        vectors: ``weights`` -> [n] the master weights; each state of the updates -> its vector, laid out by
            :class:`~gptpar.optim.state_layout.StateLayout`.
        grad: [n] the gradient, in a number format not wider than that of ``vectors``.
        steps: updates made, those of skipped steps not counted (fp64 scalar on the device).
    """

    vectors: Mapping[str, torch.Tensor]
    grad: torch.Tensor
    steps: torch.Tensor


class FlatOptimizer:
    """Updates flat vectors without ever waiting for the GPU, even to learn whether a step is skipped.

    Args:
        updates: by group.
        group_ranges: the group of each element.
        families: of the groups. One launch updates adjacent elements of one family.
        guard: is asked before ``state`` is overwritten.

    Raises:
        ValueError: a group is not in one family, or a family has groups of different updates.
    """

    def __init__(
        self,
        updates: Sequence[Update],
        state: FlatState,
        group_ranges: Sequence[GroupRange],
        families: Sequence[Family] = GPT_FAMILIES,
        guard: StateGuard | None = None,
    ):
        self._state, self._group_ranges, self._families = state, group_ranges, tuple(families)
        self._guard = guard or StateGuard()
        self._family_of = {group: number for number, family in enumerate(families) for group in family}
        _check_families(families, {one.group for one in group_ranges}, updates)
        self._updates = [updates[family[0]] for family in families]
        self._layout = StateLayout(group_ranges, updates, len(state.grad))
        self._kernels = [make_device_kernel(update, state.vectors["weights"]) for update in self._updates]
        self._calls: list[list[UpdateVectors]] = [[] for _ in families]
        self._missed: tuple[int, ...] = ()

    def lay_out(self, ranges: Sequence[ContiguousRange]) -> None:
        """Set the ranges to update. Inside a range, group ranges begin at multiples of ``ALIGNMENT``."""
        self._ranges = list(ranges)
        self._calls = [[] for _ in self._families]
        for start, stop, parameters in _joined(ranges):
            for number, low, high in self._parts(start, stop):
                if isinstance(self._updates[number], ElementwiseOptimizer):
                    part = None if parameters is None else parameters[low - start : high - start]
                    self._calls[number].append(self._call(number, low, high, part))

    def read_gradients(self, grad: torch.Tensor) -> None:
        """Read the coming steps' gradients from other memory, maybe in another number format."""
        self._state = replace(self._state, grad=grad)
        self.lay_out(self._ranges)

    def miss(self, steps: tuple[int, ...]) -> None:
        """Let the coming steps' number be smaller for some groups; ``steps``: by how much, for each group."""
        self._missed = steps

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(family's number, start, stop) of each launch that a range takes; gaps are padding."""
        group_ranges = group_ranges_between(self._group_ranges, start, stop)
        for number, neighbours in groupby(group_ranges, key=lambda one: self._family_of[one.group]):
            ends = [(one.start, one.stop) for one in neighbours]
            yield number, start + ends[0][0], start + ends[-1][1]

    def _call(self, number: int, start: int, stop: int, parameters: torch.Tensor | None) -> UpdateVectors:
        s, inside = self._state, group_ranges_between(self._group_ranges, start, stop)
        ranges = [(one.start, one.stop, one.group == self._families[number][0]) for one in inside]
        states = [self._layout.view(name, s.vectors[name], start, stop) for name in self._updates[number].states]
        vectors = (s.vectors["weights"][start:stop], *states, s.grad[start:stop])
        return UpdateVectors(vectors, parameters, ranges, _decaying_blocks(ranges, stop - start, s.grad.device))

    def check(self, hyperparameters: Sequence[Hyperparameters]) -> None:
        """Raise unless a step's hyperparameters, by group, differ inside a family by the weight decay alone.

        Raises:
            ValueError: groups of one family differ by more than the weight decay.
        """
        for family in self._families:
            first = hyperparameters[family[0]]
            for group in family[1:]:
                if hyperparameters[group] != first._replace(weight_decay=0.0):
                    raise ValueError(
                        f"groups {family[0]} and {group} are updated together: {hyperparameters[group]} is not {first} "
                        "without weight decay. Give groups that may differ families of their own."
                    )

    @torch.no_grad()
    def step(
        self, hyperparameters: Sequence[Hyperparameters], norm: torch.Tensor, loss_scale: float, max_norm: float
    ) -> list[DeviceStep]:
        """Update the elements of elementwise groups: their weights and model parameters.

        Args:
            hyperparameters: this step's, by group, as :meth:`check` wants them.
            norm, loss_scale, max_norm: see :class:`~gptpar.optim.elementwise.DeviceKernel`.

        Returns:
            The step of each family, for those whose update is not elementwise; valid until the next step.
        """
        # All families share one step counter. The first family's kernel increments it; the others increment copies
        # (after missed steps, all do).
        counters = [self._state.steps, *(self._state.steps.clone() for _ in self._families[1:])]
        if self._missed:
            counters = [self._state.steps - self._missed[family[0]] for family in self._families]
        steps = [
            kernel.begin_step(hyperparameters[family[0]], norm, loss_scale, max_norm, counter)
            for kernel, family, counter in zip(self._kernels, self._families, counters, strict=True)
        ]
        if self._missed:
            self._state.steps.add_(1 - steps[0].skipped)
        for step, calls in zip(steps, self._calls, strict=True):
            for call in calls:
                *state, _ = call.vectors
                self._guard.before_write(state)
                step.update(call)
        return steps


def _check_families(families: Sequence[Family], wanted: set[int], updates: Sequence[Update]) -> None:
    known = sorted(group for family in families for group in family)
    if len(known) > len(set(known)) or not wanted <= set(known):
        raise ValueError(f"each of the groups {sorted(wanted)} has to be in one of the families {list(families)}")
    if any(updates[group] != updates[family[0]] for family in families for group in family):
        raise ValueError(f"the groups of each of the families {list(families)} have to have one update")


def _decaying_blocks(ranges: Sequence[tuple[int, int, bool]], length: int, device: torch.device) -> torch.Tensor | None:
    """[blocks] whether each block of ``ALIGNMENT`` elements decays; ``None``: all blocks do."""
    if all(decays for *_, decays in ranges):
        return None
    found = torch.zeros(-(-length // ALIGNMENT), dtype=torch.bool)
    for start, stop, decays in ranges:
        found[start // ALIGNMENT : -(-stop // ALIGNMENT)] = decays
    return found.to(device)


def _joined(ranges: Sequence[ContiguousRange]) -> list[ContiguousRange]:
    """Join adjacent ranges: the same elements in as few ranges as possible."""
    found: list[ContiguousRange] = []
    for start, stop, parameters in ranges:
        if start == stop:
            continue
        if found and _goes_on(found[-1], start, parameters):
            start, _, before = found.pop()
            if parameters is not None and before is not None:
                parameters = before.as_strided((len(before) + len(parameters),), (1,))
        found.append((start, stop, parameters))
    return found


def _goes_on(before: ContiguousRange, start: int, parameters: torch.Tensor | None) -> bool:
    """Whether a range continues the range ``before``, at a multiple of ``ALIGNMENT``, and its parameters do so, too."""
    first, stop, other = before
    if stop != start or (start - first) % ALIGNMENT:
        return False
    if other is None or parameters is None:
        return other is parameters
    same_storage = other.untyped_storage().data_ptr() == parameters.untyped_storage().data_ptr()
    if other.dtype != parameters.dtype or not same_storage:
        return False
    return parameters.data_ptr() == other.data_ptr() + other.nbytes
