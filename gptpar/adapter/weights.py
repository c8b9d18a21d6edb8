"""Lets the user read and change a module's weights, wherever they are."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gptpar.adapter.guards.memory_watch import RELEASED, MemoryWatch, some_of
from gptpar.adapter.guards.not_copied import NotCopied
from gptpar.adapter.guards.read_guard import ReadGuard
from gptpar.adapter.module_stage import ROOT
from gptpar.adapter.placed import PlacedParameters
from gptpar.adapter.units import Scope
from gptpar.engine.engine import Engine
from gptpar.engine.ranges import Range
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Param, Unit
from gptpar.errors import GptparError, is_whole
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import DATA
from gptpar.topology.tensor_parts import TensorParts, as_parts

_VERSION = attrgetter("_version")


def copy_to_host(state: dict[str, Any], names: Iterable[str]) -> None:
    """Replace tensors of a state by copies in host memory; equal views of one memory stay one tensor."""
    copies: dict[Any, torch.Tensor] = {}
    for name in names:
        value = state[name].detach()
        place = value.data_ptr(), value.dtype, value.shape, value.stride()
        key = place if value.numel() else name
        state[name] = copies[key] = copies[key] if key in copies else value.to("cpu", copy=True)


def are_held(module: nn.Module) -> bool:
    """Whether an engine that has not been closed has weights of this module."""
    hooks = (hook for one in module.modules() for hook in one._state_dict_pre_hooks.values())
    return any(isinstance(getattr(getattr(hook, "func", None), "__self__", None), Weights) for hook in hooks)


class Weights(NotCopied):
    """Detects changes of weights by the user, and makes the module's ``state_dict`` and ``load_state_dict`` work.

    If parameters are released, ``state_dict`` gathers one scope after the other and returns copies in host memory.
    Otherwise it returns the parameters themselves, as torch's does.

    Args:
        stage: the module, or the layers of a pipeline.
        engine: has their memory.
        frozen: the units that are not trained.
        topology: this process's place.
    """

    def __init__(self, stage: PlacedParameters, engine: Engine, frozen: Sequence[Unit], topology: Topology):
        self._stage, self._engine, self._topology = stage, engine, topology
        self._frozen = {name: unit for unit in frozen for name in unit.params}
        self._loading, self._has_ended = 0, False
        self._versions = self._read_versions()
        watch = engine.gatherer.watch
        self.guard = watch if isinstance(watch, ReadGuard) else stage.read_guard(engine.gatherer)
        scopes = {scope.path: stage.scope_module(scope.path) for scope in stage.plan.scopes}
        self._memory_watch = MemoryWatch(stage.parameters, scopes, transient=engine.parameters.transient)
        for scope, module in zip(stage.plan.scopes, scopes.values(), strict=True):
            for hook in (
                module.register_state_dict_pre_hook(partial(self._before_saving, scope)),
                module.register_state_dict_post_hook(partial(self._after_saving, scope)),
                module.register_load_state_dict_pre_hook(partial(self._before_loading, scope)),
                module.register_load_state_dict_post_hook(partial(self._after_loading, scope)),
            ):
                stage.undo.callback(hook.remove)

    def _read_versions(self) -> dict[str, int]:
        with torch._C.DisableTorchFunctionSubclass():  # avoids the guard of released parameters, which takes time
            return dict(zip(self._stage.parameters, map(_VERSION, self._stage.parameters.values()), strict=True))

    def catch_up(self) -> None:
        """Update the master weights of parameters that were changed in place, which all processes do alike.

        Raises:
            GptparError: parameters are no longer in the engine's memory.
        """
        self._memory_watch.check()
        changed = self._changed()
        if changed and self._engine.parameters.transient:
            raise GptparError(f"{some_of(changed)} changed in place in the model's forward" + RELEASED)
        if changed:
            with self.gathered():
                self._take(changed)

    def require_unchanged(self) -> None:
        """Check that no parameter was changed since :meth:`catch_up`: the optimizer's step would lose the change.

        Raises:
            GptparError: some were.
        """
        versions, memory = self._read_versions(), self._engine.parameters
        if versions == self._versions:
            return
        names = versions if memory.transient else set(versions) - set(self._frozen)
        changed = [name for name in versions if name in names and versions[name] != self._versions[name]]
        if changed:
            raise GptparError(
                f"{some_of(changed)} changed in place since engine.backward(loss), or within train_batch, where the "
                "step would lose the change: nothing was updated. Change parameters after engine.step(), or before "
                "engine.backward(loss)."
            )

    def settle(self) -> None:
        """Return when master weights have all changes, and no transfer that writes to parameters is under way."""
        gatherer = self._engine.gatherer
        self.catch_up()
        self._engine.finish()
        gatherer.release_all()
        for scope in self._stage.plan.scopes if not gatherer.transient else ():
            gatherer.acquire(scope.path)

    @torch.no_grad()
    def give_back(self) -> None:
        """Give each parameter its own memory with the whole value, at the engine's end; all processes call it."""
        gatherer, parameters = self._engine.gatherer, self._stage.parameters
        members = {unit.name: unit.parameters for unit in self._stage.plan.units}
        self._has_ended = True
        for scope in self._stage.plan.scopes:  # one after the other: together they may not fit twice
            gatherer.acquire(scope.path)
            for unit in gatherer.units_of(scope.path):
                self.guard.arrived(unit)  # the block may be inside gathered()
            for name in (name for unit in gatherer.units_of(scope.path) for name in members[unit]):
                parameters[name].data = parameters[name].data.clone()
            gatherer.release(scope.path)
        gatherer.watch = None
        for name in members:
            self.guard.arrived(name)

    def undo(self) -> None:
        """Remove all hooks from the modules."""
        self._stage.undo.close()

    def parts(self) -> dict[str, TensorParts]:
        """This process's boxes of all parameters, as views: master weights of trained ones, frozen ones themselves."""
        memory, frozen = self._engine.parameters, {unit.name: unit for unit in self._frozen.values()}
        found = self._engine.optimizer.parts("weights")
        if not memory.transient:
            return found | {name: as_parts(self._stage.parameters[name].data) for name in self._frozen}
        table = ParameterTable(list(frozen.values()), self._engine.table.place)
        for name, parameter in table.params.items():
            found[name] = TensorParts(parameter.info.full_shape, (), self._stage.parameters[name].dtype)
        for one in table.ranges():
            views = table.views(one, memory.shards[one.unit][one.start : one.stop])
            found[one.param] = replace(found[one.param], parts=views)
        return found

    @property
    def roots(self) -> Mapping[str, nn.Module]:
        """Path -> module, of the modules that together have all weights of this process."""
        return self._stage.roots

    @property
    def names(self) -> dict[torch.Tensor, str]:
        """Parameter -> its first name, the same in every layout."""
        return {parameter: name for name, parameter in self._stage.parameters.items()}

    @property
    def frozen(self) -> set[str]:
        """First names of the parameters that are not trained and require no gradient."""
        with torch._C.DisableTorchFunctionSubclass():
            return {name for name in self._frozen if not self._stage.parameters[name].requires_grad}

    @property
    def aliases(self) -> dict[str, str]:
        """Each further name of a parameter or buffer -> its first one."""
        return {name: first for name, first in self._stage.plan.aliases.items() if name != first}

    def _changed(self) -> list[str]:
        versions = self._read_versions()
        changed = [name for name, version in versions.items() if version != self._versions[name]]
        if self._engine.parameters.transient:  # released memory forgets what is not taken over now
            self._versions = versions
        return changed

    @torch.no_grad()
    def _take(self, names: Collection[str]) -> None:
        """Parameters that are here have new values."""
        self._engine.finish()
        weights, memory = self._engine.optimizer.parts("weights"), self._engine.parameters
        guard = self._engine.optimizer.guard  # of a save that still reads what is about to be overwritten
        for name in names:
            if name in weights:
                guard.before_write(part for _, part in weights[name].parts)
                weights[name].fill(self._stage.parameters[name])
        for unit in {self._frozen[name].name: self._frozen[name] for name in names if name in self._frozen}.values():
            low = self._engine.table.place.shard(unit) * unit.shard_length
            guard.before_write([memory.shards[unit.name]])
            memory.shards[unit.name].copy_(memory.full[unit.name][low : low + unit.shard_length])
        self._versions = self._read_versions()  # last: a change that could not be taken over waits for the next step

    @contextlib.contextmanager
    def gathered(self, modifier_rank: int | None = None) -> Iterator[None]:
        """See :meth:`ModuleEngine.gathered <gptpar.deepspeed.engines.engine.ModuleEngine.gathered>`."""
        size = self._topology.mesh.data
        if modifier_rank is not None and not (is_whole(modifier_rank) and 0 <= modifier_rank < size):
            raise GptparError(
                f"engine.gathered(modifier_rank={modifier_rank!r}): it is the number of a process, 0 to {size - 1}, or "
                "None where all processes make the same changes."
            )
        self._engine.finish()
        self._engine.gatherer.keep_last_step()
        subscriber = self._engine.subscriber
        unchanged = contextlib.nullcontext() if subscriber is None else subscriber.without_speculation()
        with unchanged, self._engine.gatherer.held():
            with self.guard.writing():
                yield
            if self._has_ended:
                return
            self._engine.gatherer.keep_last_step()  # the block may have made the step's gradient final
            self._finish_changes(None if modifier_rank is None else int(modifier_rank))
        self._engine.gatherer.acquire_held()  # this block may be inside another one

    def _finish_changes(self, modifier_rank: int | None) -> None:
        self._memory_watch.check_present()
        changed = self._changed()
        if modifier_rank is not None:
            changed = list(self._stage.parameters)
            if (group := self._topology.group(DATA)) is not None:
                first = dist.get_global_rank(group, modifier_rank)
                for name in changed:
                    dist.broadcast(self._stage.parameters[name].data, first, group=group)
        if changed:
            self._take(changed)
            self._engine.publish()

    # Whole and local tensors of one parameter.

    def set(self, name: str, kind: str, value: torch.Tensor, *, local: bool = False) -> None:
        """Change a parameter's ``weights`` or one of the optimizer's states; all processes call it.

        Args:
            value: the whole, the same on all processes; or what :meth:`local` returns.

        Raises:
            GptparError: this process trains no parameter of that name, or the value has another shape.
        """
        param = self._to_change(name, value, local)
        self._engine.gatherer.keep_last_step()  # the CPU may have worked ahead with the old values
        self._engine.finish()
        if kind == "weights" and not self._engine.parameters.transient:
            self.catch_up()  # others may have been changed in place; publishing would overwrite them
        ranges = self._ranges_of(param, kind)
        self._engine.optimizer.guard.before_write(values for _, values in ranges)
        self._copy_into(ranges, value, local)
        if kind == "weights":
            self._engine.publish()

    @torch.no_grad()
    def set_gradient(self, name: str, value: torch.Tensor, *, local: bool = False) -> None:
        """Replace the sum of a parameter's gradient, which is final; see :meth:`set`."""
        engine, param = self._engine, self._to_change(name, value, local)
        unit = next(unit for unit in engine.table.units if param.name in unit.params)
        engine.gatherer.keep_last_step()  # the CPU may have worked ahead with the old one
        shard = torch.zeros(unit.shard_length, dtype=engine.settings.gradient_dtype, device=engine.device)
        for one, values in engine.optimizer.ranges_of("grad"):
            if one.unit == unit.name:
                shard[one.start : one.stop].copy_(values)
        here = [one for one in engine.table.ranges(unit=unit.name) if one.param == param.name]
        self._copy_into([(one, shard[one.start : one.stop]) for one in here], value, local)
        engine.gradients.reducer.replace(unit, shard)

    def whole(self, name: str, kind: str) -> torch.Tensor:
        """A parameter's ``weights``, one of the optimizer's states, or ``grad``; all processes call it.

        Raises:
            GptparError: no process trains a parameter of that name.
        """
        found = self.whole_here(name, kind)
        shape = None if found is None else found.shape
        shapes = [shape] if self._topology.mesh.pipeline == 1 else self._topology.of_all(shape)
        owner = next((rank for rank, shape in enumerate(shapes) if shape is not None), None)
        if owner is None:
            raise GptparError(f"{name} is no parameter that is trained.")
        found = self._zeros(*(shapes[owner] or ())) if found is None else found
        if len(shapes) > 1:
            dist.broadcast(found, owner)
        return found

    def whole_here(self, name: str, kind: str) -> torch.Tensor | None:
        """The same of a parameter that this process has; only its stage's processes call it. Untrained: ``None``."""
        if (param := self._trained(name)) is None:
            return None
        found = self._zeros(*param.info.full_shape)
        for one, values in self._ranges_of(param, kind):
            for offsets, part in self._engine.table.views(one, values):
                box = tuple(slice(start, start + size) for start, size in zip(offsets, part.shape, strict=True))
                found[box] = part.to(found)
        if self._engine.table.place.zero_stage:
            dist.all_reduce(found, group=self._topology.group(DATA))
        return found

    def local(self, name: str, kind: str) -> torch.Tensor | None:
        """[n] a copy of the elements that this process updates, in the order of memory. Untrained: ``None``.

        Those of all processes of the data axis, in the order of their numbers, are the whole parameter.
        """
        param = self._trained(name)
        if param is None:
            return None
        return torch.cat([self._zeros(0), *(values.to(self._zeros(0)) for _, values in self._ranges_of(param, kind))])

    def local_of(self, trained: Mapping[str, torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function from parameters to their :meth:`local` weights; untrained ones have none."""
        names = {id(parameter): name for name, parameter in trained.items()}
        alive = weakref.ref(self)  # an optimizer that the user keeps must not keep a closed engine's memory

        def of(parameter: torch.Tensor) -> torch.Tensor:
            if (weights := alive()) is None:
                raise GptparError("the engine is closed: read its master weights before close().")
            name = names.get(id(parameter))
            found = None if name is None else weights.local(name, "weights")
            return weights._zeros(0) if found is None else found

        return of

    def is_trained(self, name: str) -> bool:
        """Whether a parameter that this process has is trained."""
        return self._trained(name) is not None

    def _trained(self, name: str) -> Param | None:
        return self._engine.table.params.get(self._stage.plan.aliases.get(name, name))

    def _ranges_of(self, param: Param, kind: str) -> list[tuple[Range, torch.Tensor]]:
        found = [pair for pair in self._engine.optimizer.ranges_of(kind) if pair[0].param == param.name]
        return sorted(found, key=lambda pair: pair[0].first)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._engine.settings.wide, device=self._engine.device)

    def _to_change(self, name: str, value: torch.Tensor, local: bool) -> Param:
        if (param := self._trained(name)) is None:
            raise GptparError(f"{name} is no parameter that is trained on this process.")
        here = sum(one.length for one in self._engine.table.ranges() if one.param == param.name)
        shape = torch.Size([here]) if local else param.info.full_shape
        if shape != value.shape:
            what = "elements of this process have" if local else "parameter has"
            raise GptparError(f"{name}: the {what} the shape {tuple(shape)}, and the new value {tuple(value.shape)}.")
        return param

    @torch.no_grad()
    def _copy_into(self, ranges: Iterable[tuple[Range, torch.Tensor]], value: torch.Tensor, local: bool) -> None:
        """Copy a whole parameter, or this process's elements of it, into the memory of its ranges."""
        at = 0
        for one, into in ranges:
            if local:
                into.copy_(value[at : at + one.length])
                at += one.length
            else:
                TensorParts(value.shape, self._engine.table.views(one, into), into.dtype).fill(value)

    # state_dict and load_state_dict, scope by scope.

    def _before_saving(self, scope: Scope, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not self._loading:
            self._engine.finish()
        self._engine.gatherer.keep_last_step()
        self._engine.gatherer.acquire(scope.path)

    def _after_saving(
        self, scope: Scope, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
    ) -> None:
        if not self._engine.gatherer.transient:
            return
        here = (name for name, value in state_dict.items() if self._stage.scope_of(value) == scope.path)
        copy_to_host(state_dict, [name for name in here if name.startswith(prefix)])
        self._engine.gatherer.release(scope.path)

    def _before_loading(self, scope: Scope, module: nn.Module, state_dict: Mapping[str, Any], *rest: Any) -> None:
        if scope.path == ROOT:
            self._loading = 0  # an earlier one may have ended in an error
        self._loading += 1
        self._engine.finish()
        self._engine.gatherer.keep_last_step()
        self._engine.gatherer.acquire(scope.path)

    def _after_loading(self, scope: Scope, module: nn.Module, incompatible: Any) -> None:
        self._take(self._changed())
        self._engine.gatherer.release(scope.path)
        self._loading -= 1
        if not self._loading:
            self._engine.publish()
            self._engine.gatherer.acquire_held()
            self._memory_watch.check()
