"""Gathers sharded parameters before a layer needs them, while earlier layers run, and releases them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from gptpar.engine.backward_passes import BACKWARD_PASSES
from gptpar.engine.call_order import CallOrder, call_order
from gptpar.engine.data_axes import DataAxes
from gptpar.engine.parameter_memory import ParameterMemory
from gptpar.engine.step_graph import GraphBreaks
from gptpar.engine.subscriber import Subscriber
from gptpar.topology.groups import all_gather_single


@dataclass(frozen=True)
class _Copied:
    """A copy on its own stream, which is waited for as a collective is."""

    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class PresenceWatch(Protocol):
    """Watches when a unit's parameters become readable, and when they stop being so."""

    def arrived(self, unit: str) -> None:
        """Kernels launched from now on read the unit's current parameters; may be called twice in a row."""

    def left(self, unit: str) -> None:
        """The unit's parameters are outdated or freed until ``arrived``; may be called twice in a row."""

    def may_change(self, unit: str) -> None:
        """The unit's parameters, readable until now, may get new values before the step, until ``arrived``."""


class ParameterGatherer:
    """Gathers each layer's parameters before it is called; a :class:`~gptpar.pipeline.stage.LayerCaller`.

    Under ZeRO-1 and 2 each process updates its shard in a step, and the shards are gathered while the next forward pass
    runs: a layer waits for its own parameters only. Under ZeRO-3 a layer's parameters exist from shortly before its
    forward pass to its end, and again in the backward pass until its gradients are complete; meanwhile those of the
    following layers are gathered. Parameters that live in host memory are handled like this at any ZeRO stage. If no
    other process has a part of them, those that fit stay from a backward pass to the next micro-batch's forward pass:
    the backward pass has freed the memory of activations, which the forward pass fills again.

    Four verbs: to **start** a layer begins its gathers, after the host has waited for the subscriber's updates of this
    layer; to **acquire** it starts it and lets kernels launched from now on wait for its parameters; to **release** it
    frees its memory, if memory is transient; after a step, **changed** declares all parameters outdated. What is kept:

    ==================  ============================================================================================
    ``_present``        units that are started and neither released nor outdated: all others have to be started. With
                        transient memory, exactly these have memory. Without it, frozen units are always present
    ``_pending``        gathers that have begun and that no kernel waits for yet. Acquiring or releasing a unit removes
                        its entry; starting it again replaces the entry
    ``_in_backward``    layers whose backward pass has begun, until gradients of one of their units are complete. While
                        there are any, a forward pass recomputes: it starts no next layer, and releases none of these.
                        It is empty outside of backward passes, and without transient memory
    ``_order``          which layers are started while a layer runs, and which stay. Only :meth:`follow` changes it
    ``_updated``        units for whose update the host has waited since the last step: it need not wait again
    ``_staying``        present units that a backward pass has left for the next micro-batch's forward pass, after which
                        they are released as all others
    ``_room``           how many bytes of the device may be in use while units stay: those at the end of the forward
                        pass, less the last layer and its gradient; ``None``: nothing stays
    ``_holds``          how many :meth:`held` contexts are open: while there are any, :meth:`changed` alone releases
    ``_units``,         a layer's units, and a unit's layer; only :meth:`merge` changes them
    ``_layer_of``
    ``_is_prefetched``  whether a gather takes the device time, so that the next layer is started early
    ==================  ============================================================================================

    Args:
        layers: name -> the layer's units, which are gathered together.
        subscriber: updates some of the parameters; a layer is started when its own are updated.
        graph_breaks: where the host waits for the subscriber, also in a recorded step.
        frozen: units that no step changes.
        subscribed: whether a process of the data axis may have a subscriber, even if this one has none (its shards may
            be all padding): all processes gather at the same places.

    Attributes:
        watch: called when units become readable and stop being so; ``None``: nothing is called.
        on_call: called with a layer's name before each of its forward passes, its parameters in place.
        changes: how often the shards got new values.
    """

    def __init__(
        self,
        memory: ParameterMemory,
        layers: Mapping[str, Sequence[str]],
        data: DataAxes,
        subscriber: Subscriber | None,
        graph_breaks: GraphBreaks,
        frozen: Collection[str] = (),
        *,
        subscribed: bool = False,
    ):
        self._memory, self._data, self._subscriber, self._graph_breaks = memory, data, subscriber, graph_breaks
        self._is_sharded = any(unit.shards > 1 for unit in memory.units.values())
        self._subscribed = subscribed or subscriber is not None
        self._full, self._shards = memory.full, memory.shards
        self._units = {name: tuple(units) for name, units in layers.items()}
        self._layer_of = {unit: name for name, units in self._units.items() for unit in units}
        self._frozen = frozenset(frozen)
        self._is_prefetched = memory.transient or self._is_sharded
        self._pending: dict[str, Any] = {}
        self._present = set() if memory.transient else set(memory.full)
        self._in_backward: set[str] = set()
        self._staying: set[str] = set()
        self._room: int | None = None
        self._updated: set[str] = set()
        self._order = CallOrder()
        self.watch: PresenceWatch | None = None
        self.on_call: Callable[[str], None] = lambda name: None
        self.changes = self._holds = 0

    @property
    def transient(self) -> bool:
        """Whether whole parameters exist only while a layer needs them."""
        return self._memory.transient

    @property
    def acquires(self) -> bool:
        """Whether a layer has to acquire its parameters before it is called."""
        return self._is_prefetched or self._subscribed

    @property
    def changes_early(self) -> bool:
        """Whether a subscriber may give parameters new values before the step."""
        return self._subscribed

    @property
    def gathers_in_call_order(self) -> bool:
        """Whether processes have to call the same layers in the same order."""
        return self._is_sharded and (self._memory.transient or self._subscribed)

    @property
    def arrives_alone(self) -> bool:
        """Whether this process can acquire a unit without a collective in this step, and the unit then stays."""
        return not self._memory.transient and (not self._is_sharded or not self._subscribed)

    def is_present(self, unit: str) -> bool:
        """Whether a unit's parameters are on the device, or being gathered."""
        return unit in self._present

    def layer_of(self, unit: str) -> str:
        """The layer whose units are gathered together with this unit."""
        return self._layer_of[unit]

    def gathers_into(self, unit: str) -> torch.Tensor:
        """The memory of a whole unit, which the gatherer fills, and in which its parameters are views."""
        return self._full[unit]

    def units_of(self, name: str) -> tuple[str, ...]:
        """The units that are gathered for a layer."""
        return self._units[name]

    def merge(self, name: str, into: str) -> None:
        """Gather the units of layer ``name`` with those of layer ``into``, now and from now on."""
        moved, self._units[name] = self._units[name], ()
        self._units[into] += moved
        self._layer_of |= dict.fromkeys(moved, into)
        self.acquire(into)

    def follow(self, orders: Sequence[Sequence[str]], **kept: Collection[str]) -> None:
        """Prefetch layers in this order from now on; see :func:`~gptpar.engine.call_order.call_order`."""
        self._order = call_order(orders, {name: self._bytes_of(name) for name in self._units}, **kept)

    def changed(self) -> None:
        """Declare that the shards have new values, which each layer gets before its next call."""
        self.changes += 1
        self._updated.clear()
        if self._memory.transient:
            holds, self._holds = self._holds, 0
            self.release_all()  # inside held() as well: those values are outdated, too
            self._holds = holds
        elif self.acquires:
            self._present = set(self._frozen)
            for unit in self._full if not self._subscribed else ():
                self._start_unit(unit)
        if self.watch is not None and not self._memory.transient:
            for unit in self._full:
                if unit not in self._frozen:
                    self.watch.left(unit)

    def __call__(self, name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Call a layer with its parameters in place."""
        if name not in self._units:
            return call(x, *args)
        self.before_forward(name)
        self.on_call(name)
        y: torch.Tensor = call(x, *args)
        self.after_forward(name, y if y.requires_grad else None)
        return y

    def before_forward(self, name: str) -> None:
        """Acquire a layer, and start the next ones.

        To start the next layer, the host waits for the subscriber's update of the *next* layer before this one is
        called. Layers behind that one are started only if the host need not wait.
        """
        if self._subscriber is not None and self._subscriber.sums is not None:
            self._subscriber.sums.keep_pace()
        self.acquire(name)
        if self._is_prefetched and not self._in_backward and name not in self._order.last:
            for number, after in enumerate(self._order.following.get(name, ())):
                if number and self._subscribed and not self._updated.issuperset(self._units[after]):
                    break
                self._start(after)  # not in recomputation: the backward pass goes the other way

    def after_forward(self, name: str, output: torch.Tensor | None) -> None:
        """Release a layer after its call, unless its backward pass needs it at once; expect that pass.

        Args:
            output: the layer's output, if the backward pass will come through it; else ``None``.
        """
        if not self._memory.transient:
            return
        if output is not None and name not in self._order.lookups:
            output.register_hook(lambda _: self.before_backward(name))
        if name in self._in_backward:
            return
        if output is not None and name in self._order.last:
            # The layer's parameters and their gradient leave in the backward pass, before any other layer's stay.
            self._room = max(0, self._memory.in_use() - 2 * self._bytes_of(name))
        else:
            self.release(name)

    def before_backward(self, name: str) -> None:
        """Acquire a layer whose backward pass is about to begin, or has begun already, and start the previous one.

        A lookup, which has no use for its parameters here, is started for the next forward pass if it may stay.
        """
        if self._memory.transient:
            BACKWARD_PASSES.at_end(self.end_backward)
            self._in_backward.add(name)
        self.acquire(name)
        for previous in self._order.previous.get(name, ()):
            if previous not in self._order.lookups:
                self._start(previous)
            elif self._has_room(2 * self._bytes_of(previous)):  # its gradient comes, too
                self._start(previous)
                self._staying.update(self._units[previous])

    def _has_room(self, coming: int = 0) -> bool:
        """Whether units may stay with ``coming`` more bytes in use. Sharded ones may not: memory differs by process."""
        can_stay = self._memory.transient and not self._is_sharded
        return can_stay and self._room is not None and self._memory.in_use() + coming <= self._room

    def _bytes_of(self, name: str) -> int:
        return sum(self._full[unit].nbytes for unit in self._units[name])

    def backward_done(self, unit: str, is_final: bool = False) -> None:
        """Release a unit whose gradients are complete, or let it stay for the next micro-batch's forward pass.

        Args:
            is_final: whether the step's gradient is: a subscriber may give the parameters new values before the step.
        """
        if is_final and self.changes_early and self.watch is not None and unit in self._present:
            self.watch.may_change(unit)
        if self._memory.transient:
            self._in_backward.discard(self._layer_of[unit])
            if is_final:
                self._room = None
            if not self._has_room():
                self._release_unit(unit)
            elif unit in self._present:
                self._staying.add(unit)
                if self.watch is not None:
                    self.watch.left(unit)  # until it is acquired: as if it had been released

    def keep_last_step(self) -> None:
        """Let no subscriber change parameters before the coming step is requested, and undo what it has changed."""
        if self._subscriber is not None:
            self._subscriber.keep_last_step()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A context in which all parameters are on the device, whichever layers are called."""
        self._holds += 1
        try:
            for name in self._units:
                self.acquire(name)
            yield
        finally:
            self._holds -= 1
            self.release_all()

    def acquire_held(self) -> None:
        """Inside :meth:`held`, after :meth:`changed`: gather the new values."""
        for name in self._units if self._holds else ():
            self.acquire(name)

    def wait_for_all(self) -> None:
        """Finish all gathers that have begun: a recorded step cannot wait for work from outside of its recording.

        Where a subscriber updates parameters, each layer waits for its own parameters in the step instead.
        """
        if self._subscribed:
            self._present = set(self._frozen)
            self._updated.clear()
            return
        for name in self._units if not self._memory.transient else ():
            self.acquire(name)

    def finish_pending(self) -> None:
        """On a CPU: wait for running gathers before the shards get new values.

        Such a gather ends in a thread of its own, and writes the whole unit, this process's old shard included.
        """
        for unit in list(self._pending) if self._memory.everything.device.type == "cpu" else ():
            self._data.wait_for(self._pending.pop(unit))

    def acquire(self, name: str) -> None:
        """Let kernels launched from now on read a layer's parameters."""
        self._start(name)
        for unit in self._units[name]:
            work = self._pending.pop(unit, None)
            if work is not None:
                self._data.wait_for(work)
            if self.watch is not None:
                self.watch.arrived(unit)

    def _start(self, name: str) -> None:
        for unit in self._units.get(name, ()):
            self._start_unit(unit)

    def _start_unit(self, unit: str) -> None:
        if unit in self._present:
            return
        if self._subscriber is not None and unit not in self._frozen:
            self._graph_breaks.at(partial(self._subscriber.wait, unit))
        self._present.add(unit)
        self._updated.add(unit)
        if self._memory.transient:
            self._memory.allocate(unit)
        work = self._fill(unit)
        if work is not None:
            self._pending[unit] = work

    def _fill(self, unit: str) -> Any:
        """Begin to fill a unit's memory on the device; the result has a ``wait()``, or is ``None``."""
        full, shard = self._full[unit], self._shards[unit]
        if not self._memory.on_host and not self._memory.transient and not self._is_divided(unit):
            return None
        if self._memory.stream is None:
            if self._is_divided(unit):
                return self._gather(unit, full, shard)
            full.copy_(shard)
            return None
        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream())  # the memory may have been another layer's until now
        with torch.cuda.stream(stream):
            first = self._data.place.shard(self._memory.units[unit]) * shard.numel()
            here = full[first : first + shard.numel()].copy_(shard, non_blocking=True)
            return self._gather(unit, full, here) if self._is_divided(unit) else _Copied(stream.record_event())

    def _is_divided(self, unit: str) -> bool:
        return self._memory.units[unit].shards > 1

    def _gather(self, unit: str, full: torch.Tensor, shard: torch.Tensor) -> Any:
        group = self._data.groups.get(self._memory.units[unit].copies_over)
        return all_gather_single(full, shard, group=group, async_op=True)

    def release(self, name: str) -> None:
        """Free a layer's parameters until they are acquired again; without transient memory, they stay."""
        for unit in self._units[name] if self._memory.transient else ():
            self._release_unit(unit)

    def release_all(self) -> None:
        """Release all layers."""
        self._staying.clear()
        self.end_backward()

    def end_backward(self) -> None:
        """Release all units but those that stay for the next forward pass."""
        if self._memory.transient:
            self._in_backward.clear()
            for unit in self._full:
                if unit not in self._staying:
                    self._release_unit(unit)
                elif self.watch is not None:
                    self.watch.left(unit)

    def _release_unit(self, unit: str) -> None:
        if unit in self._present and not self._holds:
            work = self._pending.pop(unit, None)
            if work is not None:
                self._data.wait_for(work)
            if self.watch is not None:
                self.watch.left(unit)
            self._memory.free(unit)
            self._present.discard(unit)
            self._staying.discard(unit)
