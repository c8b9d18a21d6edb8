"""The parameters that forward and backward passes use, gathered in time where they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gptpar.engine.data_axis import DataAxis
from gptpar.engine.parameter_memory import ParameterMemory
from gptpar.engine.step_graph import Cuts
from gptpar.engine.subscriber import Subscriber
from gptpar.topology import all_gather_single


@dataclass(frozen=True)
class _Copied:
    """A copy on a stream of its own, in the form of a collective."""

    event: torch.cuda.Event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


class ParameterGatherer:
    """Brings each layer's parameters before it is called; a :class:`~gptpar.pipeline.stage.LayerCaller`.

    Under ZeRO-1 and 2 each process refreshes its shard after a step and the shards are gathered while the next forward
    pass runs: a layer waits for its own parameters only. Under ZeRO-3 a layer's parameters exist from shortly before
    its forward pass to its end, and again in the backward pass until its gradients are complete; the following layer's
    are gathered meanwhile. The same holds, at any stage, where the parameters' home is the host's memory: they come to
    the device for as long as a layer needs them.

    Args:
        chunks: for each of this process's virtual stages, the names of its units in calling order.
        subscriber: updates some of the parameters; a layer waits for its own before they are used.
        cuts: where the subscriber is waited for.
    """

    def __init__(
        self,
        memory: ParameterMemory,
        chunks: Sequence[Sequence[str]],
        axis: DataAxis,
        subscriber: Subscriber | None,
        cuts: Cuts,
    ):
        self._memory, self._axis, self._subscriber, self._cuts = memory, axis, subscriber, cuts
        self._full, self._shards = memory.full, memory.shards
        self._travels = memory.transient or axis.shards > 1
        self._pending: dict[str, Any] = {}
        self._present = set() if memory.transient else set(memory.full)
        self._in_backward: set[str] = set()
        self._last = {names[-1] for names in chunks if names}
        self._next: dict[str, str] = {}
        self._previous: dict[str, str] = {}
        for names in chunks:
            for before, after in zip(names, names[1:], strict=False):
                self._next.setdefault(before, after)
                self._previous[after] = before

    def changed(self) -> None:
        """The shards have new values; they are in place when a layer is called."""
        if self._memory.transient:
            self._release_all()
        elif self._axis.shards > 1:
            self._present.clear()
            for name in self._full if self._subscriber is None else ():
                self._start(name)
        elif self._subscriber is not None:
            self._present.clear()

    def _bring(self, name: str) -> Any:
        """Begin to fill a unit's memory on the device; the result has a ``wait()``, or is ``None``."""
        full, shard = self._full[name], self._shards[name]
        if not self._memory.on_host:
            return self._gather(full, shard) if self._axis.shards > 1 else None
        if self._memory.stream is None:
            if self._axis.shards > 1:
                return self._gather(full, shard)
            full.copy_(shard)
            return None
        stream = self._memory.stream
        stream.wait_stream(torch.cuda.current_stream())  # the memory may have been another layer's until now
        with torch.cuda.stream(stream):
            here = full[self._axis.shard * shard.numel() :][: shard.numel()].copy_(shard, non_blocking=True)
            return self._gather(full, here) if self._axis.shards > 1 else _Copied(stream.record_event())

    def _gather(self, full: torch.Tensor, shard: torch.Tensor) -> Any:
        return all_gather_single(full, shard, group=self._axis.group, async_op=True)

    def __call__(self, name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Call a layer with its parameters in place."""
        if name not in self._full:
            return call(x, *args)
        self._acquire(name)
        if self._travels and not self._in_backward and name not in self._last:
            self._start(self._next.get(name))  # but not while activations are computed again
        if not self._memory.transient:
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
        if self._memory.transient:
            self._in_backward.discard(name)
            self._release(name)

    def wait_for_all(self) -> None:
        """Before a step that is launched as one: let everything that is on its way arrive before it.

        Where a subscriber updates parameters, each layer will wait for its own instead.
        """
        if self._subscriber is not None:
            self._present.clear()
            return
        for name in self._full if not self._memory.transient else ():
            self._acquire(name)

    def _acquire(self, name: str) -> None:
        self._start(name)
        work = self._pending.pop(name, None)
        if work is not None:
            work.wait()

    def _start(self, name: str | None) -> None:
        if name is None or name in self._present or name not in self._full:
            return
        if self._subscriber is not None:
            self._cuts.at(partial(self._subscriber.wait, name))
        self._present.add(name)
        if self._memory.transient:
            self._memory.allocate(name)
        work = self._bring(name)
        if work is not None:
            self._pending[name] = work

    def _release(self, name: str) -> None:
        if name in self._present:
            work = self._pending.pop(name, None)
            if work is not None:
                work.wait()
            self._memory.free(name)
            self._present.discard(name)

    def _release_all(self) -> None:
        self._in_backward.clear()
        for name in self._full:
            self._release(name)
