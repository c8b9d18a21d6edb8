"""Builds any model without memory, and makes its values later, one tensor at a time and the same in every layout.

    with gptpar.deferred_init(seed=0) as recording:
        model = AnyModel()  # on the meta device: shapes, no memory
    values = recording.make(model.weight, "cuda")

The constructor's operations are recorded on a tape (:mod:`gptpar.adapter.tape`); :meth:`Recording.make` replays
those that one tensor needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from gptpar.adapter.tape import Operation, Region, Tape, keywords, tensors_in
from gptpar.errors import GptparError, ModelError

aten = torch.ops.aten
# Operators whose results have no values yet.
EMPTY = {aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
TO_PYTHON = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__format__}
FROM_PYTHON = {torch.tensor, torch.as_tensor}
# The answers of _AsOnCpu for a tensor on meta.
PRETENDED = {
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__: torch.device("cpu"),  # type: ignore[attr-defined]
}


class Recording:
    """The recorded construction of a model without memory, which makes the values of its tensors.

    All values are made on the CPU and then copied, so that they are the same bits on any device. They depend on the
    seed and the constructor alone, neither on the layout nor on which other tensors are made. Random values have the
    same distributions as after ``torch.manual_seed(seed)``, but other bits. All other values are bit for bit those of a
    construction on the CPU, except for ``linalg.svdvals``, which torch computes by another routine here. ``make`` may
    be called from several threads.

    Args:
        seed: of all random values. A generator that the constructor passes to an operator is not used. ``None``: they
            are those of a construction on the CPU, bit for bit; torch's default generator draws each of them once
            while the model is recorded, and is afterwards where that construction would leave it.
    """

    def __init__(self, seed: int | None):
        self._tape = Tape(seed)
        self._registered: list[torch.Tensor] = []  # no weak references: torch.utils.swap_tensors refuses them
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's values can be made: it is on meta, of this recording, and unchanged since."""
        tracked, version = self._versions.get(id(tensor), (tensor, None))
        unchanged = version is None or tracked._version == version
        return _on_meta(tensor) and unchanged and self._tape.holds(tensor)

    def make(self, tensor: torch.Tensor, device: torch.device | str = "cpu", name: str = "") -> torch.Tensor:
        """A tensor's values in new memory, with its strides if it is dense; a copy if it has memory already.

        Args:
            tensor: parameter, buffer or any other tensor of the model; it is not changed.
            device: of the new memory.
            name: for the error.

        Raises:
            GptparError: the values are not known, or cannot be computed.
        """
        if not _on_meta(tensor):
            return tensor.detach().to(device, copy=True)
        if not self.knows(tensor):
            raise GptparError(_unknown(name or f"a tensor of shape {tuple(tensor.shape)}"))
        try:
            return self._tape.values(tensor).to(device)
        except GptparError as error:
            raise GptparError(f"{name or 'a tensor'} cannot be made: {error}") from None

    def check(self, module: nn.Module) -> None:
        """Check that the values of all parameters and buffers can be made.

        Raises:
            ModelError: some cannot; it names all of them.
        """
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        unknown = [name for name, tensor in tensors.items() if _on_meta(tensor) and not self.knows(tensor)]
        if unknown:
            raise ModelError([_unknown(name) for name in unknown])

    def make_attributes(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        """Give values to tensors in modules' plain attributes, also inside of lists, tuples and dictionaries.

        Parameters and buffers that these refer to are left as they are.
        """
        done = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}

        def made(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in done and self.knows(tensor):
                done[id(tensor)] = self.make(tensor, device).requires_grad_(tensor.requires_grad)
                originals.append(tensor)
            return done.get(id(tensor), tensor)

        originals: list[torch.Tensor] = []  # keeps them alive, so that no id is used twice

        for one in module.modules():
            for key, value in list(vars(one).items()):
                if key not in ("_parameters", "_buffers", "_modules") and any(_on_meta(t) for t in tensors_in(value)):
                    vars(one)[key] = tree_map_only(torch.Tensor, made, value)

    def record(self, function: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call an operator on meta tensors, and record it."""
        if function is aten.lift_fresh.default and not _on_meta(args[0]):  # the result of torch.tensor or from_numpy
            return self._tape.constant(args[0])
        tensors, written = tensors_in((args, kwargs)), tensors_in(_written(function, args, kwargs))
        if not all(_on_meta(tensor) for tensor in written):  # a tensor of the user's that has memory
            args, kwargs = tree_map_only(torch.Tensor, lambda t: self.make(t) if _on_meta(t) else t, (args, kwargs))
            return function(*args, **kwargs)
        makes = "device" in keywords(function)
        if not makes and not any(_on_meta(tensor) for tensor in tensors):
            return function(*args, **kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._with_meta, (args, _without_place(kwargs)))
        return self._record(function, args, kwargs, written, makes)

    def _record(
        self, function: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any], written: list[Any], makes: bool
    ) -> Any:
        """Call an operator whose tensors are all on meta, and write it to the tape.

        Args:
            written: the arguments that it writes in place.
            makes: whether it takes a device.
        """
        on_meta, on_cpu = ({"device": torch.device(name)} if makes else {} for name in ("meta", "cpu"))
        operation = self._before(function, args, kwargs | on_cpu)
        self._tape.advance(operation)
        try:
            if torch.Tag.data_dependent_output in function.tags:
                return self._compute(operation, args, kwargs | on_cpu)
            outcome = function(*args, **kwargs, **on_meta)
        except NotImplementedError:  # shapes depend on values, or torch does not know them
            if not written:
                return self._compute(operation, args, kwargs | on_cpu)
            outcome = written[0] if function._schema.returns else None
        if torch.Tag.inplace_view not in function.tags:
            self._after(operation, outcome, written)
        return outcome

    def note(self, tensor: torch.Tensor | None) -> None:
        """Follow the changes of a parameter or buffer."""
        if tensor is not None and _on_meta(tensor):
            self._registered.append(tensor)

    def close(self) -> None:
        """End the recording; it does not see later changes, so it notes the tensors' versions."""
        self._versions = {id(tensor): (tensor, tensor._version) for tensor in self._registered}

    def _with_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if _on_meta(tensor) else self._tape.constant(tensor)

    def _region(self, tensor: torch.Tensor) -> Region:
        return self._tape.enter(tensor, foreign=True)[0]

    def _before(self, function: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Operation:
        """The part of an operation that is known before the call, which may move its arguments to other storages."""
        draw = self._tape.next_draw() if torch.Tag.nondeterministic_seeded in function.tags else None
        args, kwargs = tree_map_only(torch.Tensor, self._region, (args, kwargs))
        return Operation(function, args, kwargs, draw)

    def _after(self, operation: Operation, outcome: Any, written: list[torch.Tensor]) -> None:
        """Write an operation to the tape, unless it made only views, or memory without values."""
        entered = [self._tape.enter(tensor) for tensor in tensors_in(outcome)]
        made = tuple(region if new else None for region, new in entered)
        fresh = {region.storage for region in made if region is not None}
        targets = {self._region(tensor).storage for tensor in written}
        if operation.function.overloadpacket in EMPTY or not fresh | targets:
            return
        regions = operation.regions
        reads = {region.storage for region in regions}
        if targets and self._tape.overwrites(operation.function, regions[0], regions[1:]):
            fresh |= targets
            reads -= targets
        operation = replace(operation, made=made, default_dtype=_default_dtype(regions), reads=frozenset(reads))
        self._tape.write(replace(operation, replaces=frozenset(fresh), writes=frozenset(fresh | targets)))

    def _compute(self, operation: Operation, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Compute an operator's result from real values, because the constructor needs it while it runs."""
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = tree_map_only(torch.Tensor, self.make, (args, kwargs))
            return tree_map_only(torch.Tensor, self._tape.constant, self._tape.call(operation, args, kwargs))


class _OnMeta(TorchDispatchMode):
    """Makes every tensor on meta, and records every operator.

    ``torch.device("meta")`` would not do: a device that is named in a call has precedence over it.
    """

    def __init__(self, recording: Recording):
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        with torch._C.DisableTorchFunction():  # torch's own kernels for meta ask for the device as well
            return self._recording.record(func, args, kwargs or {})


class _AsOnCpu(TorchFunctionMode):
    """Lets tensors on meta appear to be on the CPU, and computes values that torch reads without an operator.

    Otherwise ``nn.init`` and libraries would skip their initialisation of tensors that are on meta.
    """

    def __init__(self, recording: Recording):
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in PRETENDED and _on_meta(args[0]):
            return PRETENDED[func]
        if func in TO_PYTHON and _on_meta(args[0]):
            args = (self._recording.make(args[0]), *args[1:])
        if func in FROM_PYTHON and args and not isinstance(args[0], torch.Tensor):  # numbers and tensors in lists
            data = tree_map_only(torch.Tensor, self._recording.make, args[0])
            args = (data, *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def deferred_init(seed: int | None = 0) -> Iterator[Recording]:
    """Build a model without memory: every tensor that is made in the context is on the meta device.

    All changes of values have to happen in the context: initialisation, casts, ``.to``, deep copies. Values that a
    constructor reads (``tolist``, ``item``, ``numpy``, a comparison in an ``if``) are computed. Load weights only after
    the model has memory.

    Args:
        seed: of all random values, the same on every process. ``None``: they are those of torch's default generator,
            as if the model were built on the CPU; the generator draws them once for that.

    Yields:
        the recording that makes the values.
    """
    recording = Recording(seed)

    def note(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        recording.note(tensor)

    hooks = [
        torch_module.register_module_parameter_registration_hook(note),
        torch_module.register_module_buffer_registration_hook(note),
    ]
    try:
        with _AsOnCpu(recording), _OnMeta(recording):
            yield recording
    finally:
        for hook in hooks:
            hook.remove()
        recording.close()


def _on_meta(tensor: torch.Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # past _AsOnCpu
        return tensor.is_meta


def _written(function: torch._ops.OpOverload, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator writes in place."""
    values = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return values


def _default_dtype(regions: list[Region]) -> torch.dtype | None:
    """torch's default dtype, if it decides the floating-point dtype of a result; ``None`` if the arguments do."""
    floating = any(region.dtype.is_floating_point or region.dtype.is_complex for region in regions)
    return None if floating else torch.get_default_dtype()


def _without_place(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments without device and pinning, and without a generator, which cannot draw on meta."""
    kept = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
    return kept | ({"generator": None} if "generator" in kept else {})


def _unknown(name: str) -> str:
    return (
        f"the values of {name} are not known: it was made or changed outside of gptpar.deferred_init; "
        "initialise, cast and copy the model inside the context"
    )
