"""The parameters that forward and backward passes use, brought together in time where they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gptpar.engine.data_axis import DataAxis
from gptpar.engine.step_graph import HostCalls
from gptpar.engine.units import Unit
from gptpar.pinned import host_tensors
from gptpar.topology import all_gather_single


@dataclass(frozen=True)
class _Copied:
    """A copy on a stream of its own, in the form of a collective."""

    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class LiveParameters:
    """Owns the parameters' memory; a :class:`~gptpar.pipeline.stage.LayerCaller`.

    Under ZeRO-1 and 2 each process refreshes its shard after a step and the shards are gathered while the next forward
    pass runs: a layer waits for its own parameters only. Under ZeRO-3 a layer's parameters exist from shortly before
    its forward pass to its end, and again in the backward pass until its gradients are complete; the following layer's
    are gathered meanwhile. The same holds, at any stage, where the parameters' home is the host's memory: they come to
    the device for as long as a layer needs them.

    Args:
        units: in forward order.
        chunks: names of the units in the order in which each of this process's stages calls them.
        dtype: of the parameters.
        shared: memory of all units in a row to use instead of own memory (only where nothing is sharded).
        host: updates some of the parameters; a layer waits for its own before they are used.
        on_host: whether the parameters' home is host memory.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        chunks: Sequence[Sequence[str]],
        axis: DataAxis,
        dtype: torch.dtype,
        device: torch.device,
        shared: torch.Tensor | None = None,
        host: HostCalls | None = None,
        on_host: bool = False,
    ):
        self._axis, self._host = axis, host
        self._units = {unit.name: unit for unit in units}
        self._comes_and_goes = axis.zero_stage == 3 or on_host
        self._travels = self._comes_and_goes or axis.shards > 1
        self._device, self._on_host = device, on_host
        self._inward = torch.cuda.Stream(device) if on_host and device.type == "cuda" else None
        self._views: dict[str, torch.Tensor] = {}
        total = sum(unit.length for unit in units)
        if self._comes_and_goes:
            self._full = {}
            for unit in units:  # one after the other: together they may not fit
                full = self._full[unit.name] = torch.empty(unit.length, dtype=dtype, device=device)
                self._views |= unit.views(full)
                full.untyped_storage().resize_(0)
            lengths = {unit.name: unit.shard_length for unit in units}
            if on_host:
                self._shards = host_tensors(lengths, dtype, pinned=device.type == "cuda")
            else:
                self._shards = {name: torch.zeros(n, dtype=dtype, device=device) for name, n in lengths.items()}
        else:
            buffer = torch.zeros(total, dtype=dtype, device=device) if shared is None else shared
            pieces = buffer.split([unit.length for unit in units])
            self._full = dict(zip(self._units, pieces, strict=True))
            for unit in units:
                self._views |= unit.views(self._full[unit.name])
            self._shards = {
                unit.name: piece.split(unit.shard_length)[axis.shard] for unit, piece in zip(units, pieces, strict=True)
            }
        self._pending: dict[str, Any] = {}
        self._present = set() if self._comes_and_goes else set(self._units)
        self._in_backward: set[str] = set()
        self._last = {names[-1] for names in chunks if names}
        self._next: dict[str, str] = {}
        self._previous: dict[str, str] = {}
        for names in chunks:
            for before, after in zip(names, names[1:], strict=False):
                self._next.setdefault(before, after)
                self._previous[after] = before

    def views(self) -> dict[str, torch.Tensor]:
        """Each parameter's memory on the device, which need not be there all the time."""
        return dict(self._views)

    def own(self, unit: str) -> torch.Tensor:
        """This process's shard of a unit."""
        return self._shards[unit]

    def take(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Take new values of this process's shards.

        Args:
            masters: unit -> the beginning of this process's shard, wider than the live parameters or equal; the host
                writes the rest of it.
        """
        names = [name for name in self._units if self._shards[name].data_ptr() != masters[name].data_ptr()]
        if names:
            self._copy(
                [self._shards[name][: masters[name].numel()] for name in names], [masters[name] for name in names]
            )

    def changed(self) -> None:
        """The shards have new values; they are in place when a layer is called."""
        if self._comes_and_goes:
            self._release_all()
        elif self._axis.shards > 1:
            self._present.clear()
            for name in self._units if self._host is None else ():
                self._start(name)
        elif self._host is not None:
            self._present.clear()

    def _copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        if self._inward is None:
            torch._foreach_copy_(targets, sources)
            return
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.to(target.dtype), non_blocking=True)

    def _bring(self, name: str) -> Any:
        """Begin to fill a unit's memory on the device; the result has a ``wait()``, or is ``None``."""
        full, shard = self._full[name], self._shards[name]
        if not self._on_host:
            return self._gather(full, shard) if self._axis.shards > 1 else None
        if self._inward is None:
            return self._gather(full, shard) if self._axis.shards > 1 else self._copy([full], [shard])
        self._inward.wait_stream(torch.cuda.current_stream())  # the memory may have been another layer's until now
        with torch.cuda.stream(self._inward):
            here = full[self._axis.shard * shard.numel() :][: shard.numel()].copy_(shard, non_blocking=True)
            return self._gather(full, here) if self._axis.shards > 1 else _Copied(self._inward.record_event())

    def _gather(self, full: torch.Tensor, shard: torch.Tensor) -> Any:
        return all_gather_single(full, shard, group=self._axis.group, async_op=True)

    def __call__(self, name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Call a layer with its parameters in place."""
        if name not in self._units:
            return call(x, *args)
        self._acquire(name)
        if self._travels and not self._in_backward and name not in self._last:
            self._start(self._next.get(name))  # but not while activations are computed again
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

    def settle(self) -> None:
        """Before a step that is launched as one: let everything that is on its way arrive before it.

        Where the host updates parameters, each layer will wait for its own instead.
        """
        if self._host is not None:
            self._present.clear()
            return
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
        work = self._bring(name)
        if work is not None:
            self._pending[name] = work

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
