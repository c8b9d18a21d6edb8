"""Presents any module to the engine: hooks before and after its blocks gather parameters and release them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gptpar.adapter.guards.eager_stance import EAGER_STANCE
from gptpar.adapter.guards.memory_watch import RELEASED, some_of
from gptpar.adapter.guards.order_watch import UNIT
from gptpar.adapter.guards.read_guard import ReadWatch
from gptpar.adapter.placed import PlacedParameters
from gptpar.adapter.units import Scope, UnitPlan
from gptpar.engine.backward_passes import BACKWARD_PASSES
from gptpar.engine.gatherer import ParameterGatherer
from gptpar.engine.tensors import tensors_in
from gptpar.errors import GptparError

ROOT = ""
"""Path of the scope that is the whole model."""


NO_HOOKS = "don't yet support saved tensor hooks"
UNDER_FUNC = (
    "torch.func.grad, vjp, jacrev or hessian in the model's forward: torch permits no saved-tensor hooks there, and "
    "parameters that the engine has released need them. Use torch.autograd.grad, or ZeRO stage 2 or lower "
    "without offload_param."
)


@dataclass(frozen=True)
class _Saved:
    """A parameter that autograd saves for the backward pass; its memory may be released until then."""

    unit: str
    tensor: torch.Tensor


class ModuleStage(PlacedParameters):
    """A whole module, presented to the engine as a virtual stage whose layers are the plan's scopes.

    The module object stays the user's, and so do its parameters, which get memory of the engine. Closing removes the
    engine's hooks. A scope's parameters are gathered before its forward. If parameters are released afterwards, those
    that autograd saves know their unit, whose scope is gathered again when the backward pass needs it.

    Args:
        module: the user's module; its buffers, but not yet its parameters, are on the engine's device.
        plan: the division of its parameters into units.
        note: called with the name of the place that this process has reached, and whether every process must reach it
            in the same order even if nothing is gathered.

    Attributes:
        passes: the scopes called in each training forward since :meth:`take_passes`, in order.
        observes_backward: whether the coming backward passes are observed.
        comes_back: is called when a gradient reaches an output of the module.
    """

    def __init__(self, module: nn.Module, plan: UnitPlan, note: Callable[[str, bool], None] = lambda *place: None):
        super().__init__(plan, dict(module.named_parameters()))
        self.module, self.stages, self._note = module, (self,), note
        self.roots = {"": module}
        self.passes: list[list[str]] = []
        self.comes_back: Callable[[], None] = lambda: None
        self._gatherer: ParameterGatherer | None = None
        self._depth = 0
        self._kept: saved_tensors_hooks | None = None
        self._read_watch: ReadWatch | None = None
        self._is_bringing = self.observes_backward = False
        self._open_forwards = 0  # uncompiled ones whose backward pass has not come
        self._called: list[str] = []
        self._changed_at: dict[str, int] = {}
        self._untrained = {
            name: parameter for name, parameter in self.parameters.items() if not parameter.requires_grad
        }
        self._uncompiled = contextlib.ExitStack()
        self._frozen = {unit.name for unit in plan.units if not unit.trainable}

    @property
    def in_backward(self) -> bool:
        """Whether autograd runs, for whomever; a forward pass inside is a recomputation."""
        return BACKWARD_PASSES.is_running or torch._C._current_graph_task_id() >= 0

    @property
    def may_observe(self) -> bool:
        """Whether backward passes may read parameters that have been released, or that an optimizer has changed."""
        return self._gatherer is not None and (self._gatherer.transient or self._gatherer.changes_early)

    # The engine's interface.

    def call_order(self) -> list[str]:
        """Scopes in the order of their definition; the module may call them in another order."""
        return [scope.path for scope in self.plan.scopes]

    def units_by_layer(self) -> dict[str, tuple[str, ...]]:
        """Path of a scope -> its units."""
        return {scope.path: scope.units for scope in self.plan.scopes}

    def lookups(self) -> Collection[str]:
        """None is known: a module may read its parameters in any way."""
        return ()

    def global_parameters(self) -> dict[str, nn.Parameter]:
        """First name -> parameter, of all trained parameters."""
        trained = (name for unit in self.plan.units if unit.trainable for name in unit.parameters)
        return {name: self.parameters[name] for name in trained}

    def call_through(self, gatherer: ParameterGatherer) -> None:
        """Register the hooks that gather parameters."""
        self._gatherer = gatherer
        self.undo.callback(self._uncompiled.close)  # the first forward's backward pass may never have come
        if gatherer.acquires:
            self._watch_reads()
        trained = self.global_parameters()
        for name, parameter in self.parameters.items():  # trainable, but in no group of an optimizer, if there is one
            if parameter.requires_grad and trained and name not in trained:
                self.undo.callback(parameter.register_post_accumulate_grad_hook(_drop_gradient).remove)
        for scope in self.plan.scopes:
            module = self.scope_module(scope.path)
            before = torch._dynamo.disable(partial(self._before, scope))
            after = torch._dynamo.disable(partial(self._after, scope))
            self.undo.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
            self.undo.callback(module.register_forward_hook(after, always_call=True).remove)

    def take_passes(self) -> list[list[str]]:
        """The scopes that were called in each training forward since the last call of this method."""
        passes, self.passes = self.passes, []
        return passes

    def scope_module(self, path: str) -> nn.Module:
        """See :meth:`PlacedParameters.scope_module`."""
        return self.module.get_submodule(path)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A context for a call of the whole module; an error leaves no hooks behind."""
        depth = self._depth
        try:
            yield
        except BaseException as error:
            self._depth, self._is_bringing = depth, False
            self._called.clear()
            self._leave(succeeded=False)
            if NO_HOOKS in str(error):
                raise GptparError(UNDER_FUNC) from error
            raise

    @contextlib.contextmanager
    def backward(
        self, reads_late: Callable[[str], bool], *, last: bool, exchanges: bool, observed: bool = True
    ) -> Iterator[None]:
        """A context for a backward pass.

        In the first micro-batch, recomputation runs uncompiled, because its forward pass did, and is observed, too.

        Args:
            reads_late: takes the name of a parameter that an operator of an observed pass is about to read; returns
                whether its gradient has come already.
            last: whether this is the step's last pass.
            exchanges: whether gradients are summed over processes in it.
            observed: whether the engine has begun the pass, so that it can be observed.
        """
        self._note("a backward pass", exchanges)
        look, observes = partial(self._read_in_backward, reads_late), self.observes_backward and observed
        watch = ReadWatch(look, lambda tensor: None) if observes else contextlib.nullcontext()
        succeeded = False
        try:
            with BACKWARD_PASSES.one(owned=observed), watch:
                yield
            succeeded = True
        finally:
            self._open_forwards -= 1
            if self.observes_backward and not succeeded:
                self._watch_reads()  # of the next forward pass, whose backward pass may succeed
            if last or not succeeded:
                self._end_observation()

    def end_micro_batch(self) -> None:
        """End the observation with the first micro-batch, or with its step if the step is dropped.

        It goes on to the step's last pass while a backward pass may come of a forward pass that ran uncompiled: its
        recomputation has to run uncompiled, too.
        """
        if self._open_forwards <= 0:
            self._end_observation()

    def _end_observation(self) -> None:
        self._uncompiled.close()
        self.observes_backward, self._open_forwards = False, 0

    # Around a scope's forward.

    def _before(self, scope: Scope, module: nn.Module, args: Any, kwargs: Any) -> None:
        assert self._gatherer is not None
        self._note(UNIT + (scope.path or "(the whole model)"), False)
        if self.in_backward:
            if self._gatherer.transient:
                self._gatherer.before_backward(scope.path)
            return
        self._called.append(scope.path)
        if scope.path == ROOT:
            self._begin()
        self._gatherer.keep_last_step()  # this may be a call between the last backward pass and the step
        if torch.is_grad_enabled():
            if not self.passes:
                self.passes.append([])
            self.passes[-1].append(scope.path)
            self._let_go_of_frozen(scope, (args, kwargs))
        self._is_bringing = True  # the watch observes the module's operators, not ours
        self._gatherer.before_forward(scope.path)
        self._is_bringing = False

    def _after(self, scope: Scope, module: nn.Module, args: Any, output: Any) -> None:
        assert self._gatherer is not None
        # Not a leaf, which was not computed here: a hook on it would stay.
        found = next((t for t in tensors_in(output) if t.grad_fn is not None), None)
        self._gatherer.after_forward(scope.path, found)
        if self.in_backward:
            return
        if scope.path in self._called:
            self._called.remove(scope.path)
        if scope.path == ROOT and self._depth:
            self._depth -= 1
            self._require_fresh(output)
            if not self._depth:
                self._leave(succeeded=output is not None)

    def _begin(self) -> None:
        """Begin a call of the whole module, which may be inside of another one."""
        if torch.is_grad_enabled():
            self._require_laid_out()
        self._depth += 1
        if self._depth > 1 or self._gatherer is None:
            return
        if torch.is_grad_enabled():
            self.passes.append([])
            self._open_forwards += 1
            if self._gatherer.transient:
                self._kept = saved_tensors_hooks(self._pack, self._unpack)
                self._kept.__enter__()
        if self._read_watch is not None:
            EAGER_STANCE.force()
            self._uncompiled.callback(EAGER_STANCE.restore)
            self._read_watch.__enter__()
            self.is_watching = True

    def _require_fresh(self, output: Any) -> None:
        """Refuse backward passes of this output after the next step, when its graph refers to the new weights."""
        assert self._gatherer is not None
        gatherer, changes = self._gatherer, self._gatherer.changes

        def check(grad: torch.Tensor) -> None:
            if gatherer.changes != changes:
                raise GptparError(
                    "engine.backward(loss) of a forward pass before the last engine.step(): the weights have changed "
                    "since, so that the gradient would be wrong. The step's gradients were dropped; call the model "
                    "again."
                )
            self.comes_back()

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(check)

    def _require_laid_out(self) -> None:
        """Refuse to train parameters that were frozen from the beginning; the others may be frozen for a while."""
        with torch._C.DisableTorchFunctionSubclass():  # avoids the guard of released parameters, which takes time
            new = [name for name, parameter in self._untrained.items() if parameter.requires_grad]
        if new:
            raise GptparError(
                f"requires_grad of {some_of(new)} was set after gptpar.initialize, which has laid out memory for what "
                "is trained: freeze parameters that are trained later after gptpar.initialize."
            )

    def _leave(self, *, succeeded: bool) -> None:
        """End a call of the whole module."""
        if self._read_watch is not None and self.is_watching:
            self._read_watch.__exit__(None, None, None)
            self.is_watching = False
            self._require_no_hidden_changes()
            if succeeded and torch.is_grad_enabled():
                self._read_watch = None  # only one whole training pass is observed, because that takes time
                self.observes_backward = self.may_observe
            else:
                self._end_observation()
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.__exit__(None, None, None)

    # Parameters that are gathered and released.

    def _watch_reads(self) -> None:
        """Have the next forward pass observed."""
        self._read_watch = ReadWatch(self._read_outside, self._note_change)

    def _read_outside(self, tensor: torch.Tensor) -> None:
        """An operator of the first pass reads a tensor; a parameter outside of its scope's call must stay gathered."""
        unit = self.unit_in(tensor)
        if unit is None or self._gatherer is None or self._is_bringing:
            return
        if self._gatherer.layer_of(unit.name) in (ROOT, *self._called):
            return
        if self._gatherer.transient:
            warnings.warn(
                f"parameters of {unit.scope} are read outside of its call: from now on they stay gathered during the "
                "whole model's forward and backward pass, which takes memory.",
                stacklevel=2,
            )
        self._gatherer.merge(unit.scope, into=ROOT)

    def _read_in_backward(self, reads_late: Callable[[str], bool], tensor: torch.Tensor) -> None:
        """An operator of an observed backward pass reads a tensor, maybe of a unit whose gradient is complete.

        Then the unit may have been released, or an optimizer may have worked ahead with that gradient.
        """
        unit, gatherer = self.unit_in(tensor), self._gatherer
        if unit is None or gatherer is None or tensor is gatherer.gathers_into(unit.name):
            return
        late = [name for name in self._names_in(tensor) if reads_late(name)]
        if late:
            gatherer.keep_last_step()
        if not gatherer.is_present(unit.name):
            gatherer.before_backward(gatherer.layer_of(unit.name))

    def _note_change(self, tensor: torch.Tensor) -> None:
        """An operator of the first pass is about to change a tensor in place; parameters have another version then."""
        for name in self._names_in(tensor) if not self._is_bringing else ():
            with torch._C.DisableTorchFunctionSubclass():
                self._changed_at.setdefault(name, self.parameters[name]._version)

    def _names_in(self, tensor: torch.Tensor) -> list[str]:
        """The parameters in whose memory a tensor begins."""
        unit = self.unit_in(tensor)
        if unit is None:
            return []
        with torch._C.DisableTorchFunctionSubclass():
            begin, known = tensor.data_ptr(), [(name, self.parameters[name]) for name in unit.parameters]
            return [name for name, own in known if 0 <= begin - own.data_ptr() < max(own.nbytes, 1)]

    def _require_no_hidden_changes(self) -> None:
        """Refuse changes in place, in the pass that was observed, of which the optimizer would not learn.

        Parameters that stay are compared by their versions later. Only changes through ``.data`` keep the version; they
        are lost when the optimizer updates its own copies, as are all changes when parameters are released.
        """
        assert self._gatherer is not None
        changed_at, self._changed_at = self._changed_at, {}
        trained, transient = self.global_parameters(), self._gatherer.transient
        with torch._C.DisableTorchFunctionSubclass():
            kept = [name for name, version in changed_at.items() if self.parameters[name]._version == version]
        hidden = [name for name in changed_at if transient or (name in kept and name in trained)]
        if hidden and transient:
            raise GptparError(f"{some_of(hidden)} changed in place in the model's forward" + RELEASED)
        if hidden:
            raise GptparError(
                f"{some_of(hidden)} changed in place through .data in the model's forward: the optimizer has its own "
                "copy of them and does not notice. Leave out .data and write under torch.no_grad()."
            )

    def _pack(self, tensor: torch.Tensor) -> Any:
        unit = self.unit_in(tensor)
        return tensor if unit is None else _Saved(unit.name, tensor)

    def _unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Saved):
            return kept
        assert self._gatherer is not None
        self._gatherer.before_backward(self._gatherer.layer_of(kept.unit))
        return kept.tensor

    def _let_go_of_frozen(self, scope: Scope, inputs: Any) -> None:
        """Release frozen units, which get no gradients, when the gradient of the scope's input is complete."""
        gatherer = self._gatherer
        if not self._frozen or gatherer is None or scope.path == ROOT or not gatherer.transient:
            return
        frozen = [unit for unit in gatherer.units_of(scope.path) if unit in self._frozen]
        first = next((t for t in tensors_in(inputs) if t.grad_fn is not None), None)

        def let_go(grad: torch.Tensor) -> None:
            for unit in frozen if self.in_backward else ():
                gatherer.backward_done(unit)

        if frozen and first is not None:
            first.register_hook(let_go)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
