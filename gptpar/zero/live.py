"""The parameters that forward and backward passes use, brought together in time where they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from gptpar.topology import all_gather_single
from gptpar.zero.place import DataAxis
from gptpar.zero.units import Unit


class Host(Protocol):
    """Updates parameters in the background."""

    def wait(self, unit: str) -> None: ...


class LiveParameters:
    """Owns the parameters' memory; a :class:`~gptpar.pipeline.stage.LayerCaller`.

    Under ZeRO-1 and 2 each process refreshes its shard after a step and the shards are gathered while the next forward
    pass runs: a layer waits for its own parameters only. Under ZeRO-3 a layer's parameters exist from shortly before
    its forward pass to its end, and again in the backward pass until its gradients are complete; the following layer's
    are gathered meanwhile.

    Args:
        units: in forward order.
        chunks: names of the units in the order in which each of this process's stages calls them.
        dtype: of the parameters.
        shared: memory of all units in a row to use instead of own memory (only where nothing is sharded).
        host: updates some of the parameters; a layer waits for its own before they are used.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        chunks: Sequence[Sequence[str]],
        axis: DataAxis,
        dtype: torch.dtype,
        device: torch.device,
        shared: torch.Tensor | None = None,
        host: Host | None = None,
    ):
        self._axis, self._host = axis, host
        self._units = {unit.name: unit for unit in units}
        self._comes_and_goes = axis.zero_stage == 3
        total = sum(unit.length for unit in units)
        if self._comes_and_goes:
            self._full = {u.name: torch.zeros(u.length, dtype=dtype, device=device) for u in units}
            self._shards = {u.name: torch.zeros(u.shard_length, dtype=dtype, device=device) for u in units}
        else:
            buffer = torch.zeros(total, dtype=dtype, device=device) if shared is None else shared
            pieces = buffer.split([unit.length for unit in units])
            self._full = dict(zip(self._units, pieces, strict=True))
            self._shards = {
                unit.name: piece.split(unit.shard_length)[axis.shard] for unit, piece in zip(units, pieces, strict=True)
            }
        self._pending: dict[str, Any] = {}
        self._present = set(self._units)
        self._in_backward: set[str] = set()
        self._last = {names[-1] for names in chunks if names}
        self._next: dict[str, str] = {}
        self._previous: dict[str, str] = {}
        for names in chunks:
            for before, after in zip(names, names[1:], strict=False):
                self._next.setdefault(before, after)
                self._previous[after] = before

    def views(self) -> dict[str, torch.Tensor]:
        """Each parameter's memory; to be asked for before the first :meth:`publish`, which may take it away."""
        return {name: view for unit in self._units.values() for name, view in unit.views(self._full[unit.name]).items()}

    def own(self, unit: str) -> torch.Tensor:
        """This process's shard of a unit."""
        return self._shards[unit]

    def publish(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Take new values; they are in place when a layer is called.

        Args:
            masters: unit -> the beginning of this process's shard, wider than the live parameters or equal; the host
                writes the rest of it.
        """
        names = [name for name in self._units if self._shards[name].data_ptr() != masters[name].data_ptr()]
        if names:
            targets = [self._shards[name][: masters[name].numel()] for name in names]
            torch._foreach_copy_(targets, [masters[name] for name in names])
        if self._comes_and_goes:
            self._release_all()
        elif self._axis.shards > 1:
            self._present.clear()
            for name in self._units if self._host is None else ():
                self._start(name)
        elif self._host is not None:
            self._present.clear()

    def _gather(self, name: str) -> Any:
        return all_gather_single(self._full[name], self._shards[name], group=self._axis.group, async_op=True)

    def __call__(self, name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Call a layer with its parameters in place."""
        if name not in self._units:
            return call(x, *args)
        self._acquire(name)
        if not self._in_backward and name not in self._last:  # not while activations are computed again
            self._start(self._next.get(name))
        if not self._comes_and_goes:
            return call(x, *args)
        y: torch.Tensor = call(x, *args)
        if y.requires_grad:
            y.register_hook(lambda _: self._before_backward(name))
        if name not in self._in_backward and not (y.requires_grad and name in self._last):
            self._release(name)
        return y

    def _before_backward(self, name: str) -> None:
        self._in_backward.add(name)
        self._acquire(name)
        self._start(self._previous.get(name))

    def backward_done(self, name: str) -> None:
        """A unit's gradients are complete: its parameters are not needed again in this pass."""
        if self._comes_and_goes:
            self._in_backward.discard(name)
            self._release(name)

    def wait(self) -> None:
        """Let everything that is on its way arrive before what follows on the device."""
        for name in self._units if not self._comes_and_goes else ():
            self._acquire(name)

    def _acquire(self, name: str) -> None:
        self._start(name)
        work = self._pending.pop(name, None)
        if work is not None:
            work.wait()

    def _start(self, name: str | None) -> None:
        if name is None or name in self._present or name not in self._units:
            return
        if self._host is not None:
            self._host.wait(name)
        self._present.add(name)
        if self._comes_and_goes:
            full = self._full[name]
            full.untyped_storage().resize_(full.numel() * full.element_size())
        if self._axis.shards > 1:
            self._pending[name] = self._gather(name)

    def _release(self, name: str) -> None:
        if name in self._present:
            work = self._pending.pop(name, None)
            if work is not None:
                work.wait()
            self._full[name].untyped_storage().resize_(0)
            self._present.discard(name)

    def _release_all(self) -> None:
        self._in_backward.clear()
        for name in self._units:
            self._release(name)
