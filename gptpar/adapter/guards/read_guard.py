"""Guards released parameters against being read: outside of forward their values may be old or missing.

While a unit is released, its parameters belong to a subclass of their own class, which sees every operator before it
reads them. A parameter is never copied for that, and remains the same object. When its unit is gathered, it gets its
own class again, so that forward and backward passes see plain parameters. Where an optimizer works ahead, units are
guarded from their final gradient to the step, too. The optimizer takes its work back for a reader, such as a hook amid
a backward pass. Where gradients are not in ``.grad``, all units are guarded from the last backward pass to the step, so
that torch's clipping is noticed. :class:`ReadWatch` finds, in a module's first pass, which parameters are read early.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptpar.adapter.guards.order_watch import MEET_SECONDS
from gptpar.engine.gatherer import ParameterGatherer
from gptpar.engine.tensors import tensors_in
from gptpar.errors import GptparError

CLIPS = "torch.nn.utils.clip_grad"
"""The module of ``clip_grad_norm_`` and ``clip_grad_value_``."""

VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes of a tensor that give access to its elements; all others only describe it."""

ABOUT = {
    *("size", "dim", "ndimension", "numel", "nelement", "__len__", "stride", "storage_offset", "element_size", "type"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference", "is_shared", "is_pinned"),
    *("_is_view", "get_device", "data_ptr", "untyped_storage", "result_type", "can_cast", "empty_like", "new_empty"),
    *("zeros_like", "ones_like", "new_zeros", "new_ones", "requires_grad_", "retain_grad", "register_hook"),
    *("register_post_accumulate_grad_hook", "_has_compatible_shallow_copy_type"),
}
"""Functions and methods that describe a tensor and read none of its elements."""

CASTS = {"to", "type", "float", "double", "half", "bfloat16", "cuda", "cpu"}
"""Methods that return the tensor itself if it has the requested format and device already."""


class ReadGuard:
    """Guards the parameters of released units (:class:`~gptpar.engine.gatherer.PresenceWatch`).

    If one is read, and this process can gather its unit alone, the unit is gathered first. If it needs the others, and
    parameters stay once they are gathered, all units are, provided that all processes read one. Otherwise an error says
    how to read the parameter.

    Args:
        parameters: by name.
        units: name -> names of its parameters.
        gatherer: gathers them.
        is_watching: whether every operator is observed already, so that parameters are gathered before it reads them.
        meets: waits for all processes, and returns whether they have come to this place; ``None``: they never do.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        units: Mapping[str, Sequence[str]],
        gatherer: ParameterGatherer,
        is_watching: Callable[[], bool],
        meets: Callable[[str], bool] | None = None,
    ):
        self._gatherer, self._is_watching, self._meets = gatherer, is_watching, meets
        self._classes: dict[type, type] = {}
        self._members = {
            unit: [(p := parameters[name], type(p), self._watched(type(p))) for name in names]
            for unit, names in units.items()
        }
        self._unit_of = {id(parameters[name]): unit for unit, names in units.items() for name in names}
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._away: set[str] = set()
        self._here: set[str] = set()
        self._lasts = True  # False: the gatherer tells it of units until the step alone
        for unit in self._members:
            if not gatherer.is_present(unit):
                self.left(unit)

    def left(self, unit: str) -> None:
        """Begin to guard a unit, whose parameters have been released."""
        self._here.discard(unit)
        if unit not in self._away:
            self._away.add(unit)
            for parameter, _, watched in self._members[unit]:
                parameter.__class__ = watched

    def arrived(self, unit: str) -> None:
        """Stop guarding a unit, whose parameters have been gathered."""
        self._here.discard(unit)
        if unit in self._away:
            self._away.discard(unit)
            for parameter, plain, _ in self._members[unit]:
                parameter.__class__ = plain

    def may_change(self, unit: str) -> None:
        """Guard a unit that is here: its parameters do not get their own class until their forward."""
        self.left(unit)
        self._here.add(unit)

    def until_step(self) -> None:
        """Guard all units until :meth:`step_ended` or their next forward: gradients are final, and not in ``.grad``."""
        if self._gatherer.watch is None:
            self._gatherer.watch, self._lasts = self, False
        for unit in self._members.keys() - self._away:
            self.may_change(unit)

    def reopen(self) -> None:
        """Stop guarding units that are here: their gradients are no longer final."""
        for unit in list(self._here):
            self.arrived(unit)

    def step_ended(self) -> None:
        """End :meth:`until_step`, unless there are more reasons to guard units."""
        if not self._lasts:
            self._gatherer.watch, self._lasts = None, True
            for unit in self._members:
                self.arrived(unit)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A context in which gathered parameters stay guarded, so that changes through ``.data`` are noticed."""
        present = [unit for unit in self._members if unit not in self._away]
        for unit in present:
            self.may_change(unit)
        try:
            yield
        finally:
            for unit in present:
                self.arrived(unit)

    def read(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], others: Iterable[ReadGuard] = ()
    ) -> Any:
        """Call a function on parameters some of which are released; returns its result.

        Args:
            others: guards of other engines' parameters among the arguments.

        Raises:
            GptparError: these cannot be gathered by this process alone, or the function gives them other memory.
        """
        name = getattr(function, "__name__", "")
        attribute = (
            getattr(getattr(function, "__self__", None), "__name__", "") if name in ("__get__", "__set__") else ""
        )
        if attribute == "grad":
            refuse_clipping(sys._getframe(2))
        with torch._C.DisableTorchFunctionSubclass():
            if name in CASTS and self._changes_nothing(function, args, kwargs):
                return args[0]
            if name == "__set__" and attribute == "data":
                if args[1] is args[0]:  # a cast of the whole module that changes nothing
                    return None
                raise GptparError(self._told("{} was to get other memory by .data = ...", args[:1]) + IN_PLACE)
            if not (name in ABOUT or attribute and attribute not in VIEWS):
                for guard in (self, *others):
                    guard._bring((args, kwargs))
            if name == "__get__" and attribute == "data":
                return args[0].detach()  # has the parameter's version, which tells that it was changed in place
            return function(*args, **kwargs)

    def plainly(self, parameter: Any, function: Callable[[], Any]) -> Any:
        """Call a function while a parameter, gathered if it can be, has its own class."""
        self.read(torch.Tensor.detach, (parameter,), {})
        watched = type(parameter)
        parameter.__class__ = watched.__bases__[-1]
        try:
            return function()
        finally:
            parameter.__class__ = watched

    def _changes_nothing(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a cast returns the parameter itself."""
        like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
        return function(like, *args[1:], **kwargs) is like

    def _bring(self, values: Any) -> None:
        """Gather the units of parameters among some values, unless an operator's observer does."""
        tensors = [] if self._is_watching() else list(tensors_in(values))
        units = dict.fromkeys(self._unit_of[id(one)] for one in tensors if id(one) in self._unit_of)
        if units:
            self._gatherer.keep_last_step()
        away = [unit for unit in units if unit in self._away and unit not in self._here]
        if away and not self._gatherer.arrives_alone:
            self._require_all_to_read([one for one in tensors if self._unit_of.get(id(one)) in away])
            away = list(self._members)  # in the same order on all processes
        for unit in away:
            layer = self._gatherer.layer_of(unit)
            self._gatherer.acquire(layer)
            for one in self._gatherer.units_of(layer):
                self.may_change(one)

    def _require_all_to_read(self, parameters: Sequence[torch.Tensor]) -> None:
        """Check that all processes read parameters now, with the same units present, and that these then stay."""
        present = "".join(f"{self._gatherer.is_present(unit):d}" for unit in self._members)
        place = f"values {self._gatherer.changes}, units {present}"
        if self._gatherer.transient or self._meets is None or not self._meets(place):
            remedy = GATHERED if self._gatherer.transient else GATHERED + ALL_READ
            raise GptparError(self._told("{} was read outside of the model's forward", parameters) + remedy)

    def _told(self, sentence: str, parameters: Any) -> str:
        return sentence.format(", ".join(dict.fromkeys(self._names.get(id(one), "a parameter") for one in parameters)))

    def _watched(self, plain: type) -> type:
        """The class of released parameters: a guarded subclass of their own."""
        if plain not in self._classes:
            inherited = (_Watched, plain)
            self._classes[plain] = type(plain)(
                plain.__name__, inherited, {"_guard": self, "__module__": plain.__module__}
            )
        return self._classes[plain]


GATHERED = (
    ", where its values are not on this process: they are spread over all processes, or on the host. Read and change "
    "parameters inside `with engine.gathered():`, which all processes enter."
)
ALL_READ = f" Without it, all have to read within {MEET_SECONDS:g} seconds, which a pipeline's stages cannot."
IN_PLACE = (
    ", but has to stay in the engine's. Change parameters in place (copy_(), or load_state_dict() without assign) "
    "inside `with engine.gathered():`; cast and move the model before gptpar.initialize, or call engine.close() before."
)


class _Watched:
    """Base of the classes of released parameters."""

    _guard: ReadGuard

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        guards = dict.fromkeys(one._guard for one in types if issubclass(one, _Watched))  # alike on all processes
        return cls._guard.read(func, args, kwargs or {}, [one for one in guards if one is not cls._guard])

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._guard.plainly(self, lambda: copy.deepcopy(self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._guard.plainly(self, lambda: self.__reduce_ex__(protocol))


def refuse_clipping(reader: FrameType | None) -> None:
    """Raise if it is torch's clipping that reads parameters or ``.grad``.

    Args:
        reader: the frame that reads.

    Raises:
        GptparError: it is.
    """
    if reader is not None and reader.f_globals.get("__name__") == CLIPS:
        raise GptparError(
            "torch's clipping of an engine's parameters would change nothing: with ZeRO, offload or 16-bit sums, "
            "gradients are in the engine and not in parameter.grad. Set gradient_clipping in the configuration: each "
            "step clips by it, and engine.get_global_grad_norm() has the norm."
        )


class ReadWatch(TorchDispatchMode):
    """Calls a function with every tensor that an operator is about to read, another one with those it will change.

    A block's parameters are gathered before it is called. Code that reads them at another time would read old values,
    or none at all. Inside of compiled functions, operators cannot be observed, and a function whose first call is under
    a mode stays uncompiled forever; so run code uncompiled meanwhile.

    Args:
        look: takes each tensor, and may gather its values.
        note_change: takes each tensor that is about to be changed in place.
    """

    def __init__(self, look: Callable[[torch.Tensor], None], note_change: Callable[[torch.Tensor], None]):
        super().__init__()
        self._look, self._note_change = look, note_change

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            for tensor in tensors_in((args, kwargs or {})):
                self._look(tensor)
        if func._schema.is_mutable:
            given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
            for one in func._schema.arguments:
                if one.alias_info is not None and one.alias_info.is_write:
                    for tensor in tensors_in(given.get(one.name)):
                        self._note_change(tensor)
        return func(*args, **(kwargs or {}))
