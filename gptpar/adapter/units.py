"""Divides any module into the units that are reduced, gathered and released. Pure: it reads the module's structure.

A scope is a submodule whose parameters are gathered before its forward: a repeated block, or the whole model for
parameters outside of blocks. A scope's parameters are in flat units: one for each dtype, trainable or frozen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gptpar.adapter.guards.refusals import problems_of
from gptpar.errors import ModelError

MIN_OWN_UNIT = 2**20  # a parameter of the root with this many elements is a unit of its own, and is reduced by itself


@dataclass(frozen=True)
class FlatUnit:
    """Parameters in one flat buffer: of the same scope and dtype, all trainable or all frozen.

    Attributes:
        name: the scope's path, with a suffix if the scope has several units.
        scope: path of the :class:`Scope`.
        parameters: their first names, in order of definition.
        trainable: whether they are trained.
    """

    name: str
    scope: str
    parameters: tuple[str, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class Scope:
    """A submodule whose parameters are gathered before its forward.

    Attributes:
        path: as in ``named_modules``; "" is the whole model.
        units: their names, in order of definition; only the whole model may have none.
    """

    path: str
    units: tuple[str, ...]


@dataclass(frozen=True)
class UnitPlan:
    """The division of a module's parameters into scopes and units.

    Attributes:
        scopes: the whole model first, the others in order of definition; no other scope contains another.
        units: in order of definition of their first parameter. Each parameter is in one, under its first name.
        buffers: first names, in order of definition.
        aliases: for parameters and buffers with several names: each name, the first included -> the first.
    """

    scopes: tuple[Scope, ...]
    units: tuple[FlatUnit, ...]
    buffers: tuple[str, ...]
    aliases: dict[str, str]


def find_units(
    module: nn.Module,
    classes: Collection[str] = (),
    *,
    dtype: torch.dtype | None = None,
    buffers: torch.dtype | None = None,
    trained: Collection[nn.Parameter] | None = None,
) -> UnitPlan:
    """Divide a module into units.

    Blocks are the repeated elements of a container (``ModuleList``, ``Sequential``, ``ModuleDict``, any module with
    numbered children): elements with parameters whose class occurs at least twice in it, except for single layers of
    torch. Only outermost blocks count: a block's experts are part of it. A parameter of several blocks, or of none,
    belongs to the whole model.

    Args:
        module: the model.
        classes: names of the blocks' classes; if given, the outermost modules of these classes are the only blocks.
        dtype, buffers: that parameters and buffers will have (see :func:`dtypes_of`); ``None``: they keep theirs.
        trained: the parameters in the optimizer's groups; default: all that require a gradient.

    Raises:
        ModelError: the module cannot be divided; it names every reason.
    """
    problems = [*_unknown_classes(module, classes), *problems_of(module)]
    if problems:
        raise ModelError(problems)
    blocks = set(_named_blocks(module, set(classes)) if classes else _repeated_blocks(module)) - {module}
    paths: dict[nn.Module, str] = {}
    names = TensorNames()
    scopes_of: dict[torch.Tensor, set[str]] = {}
    for path, owner, above in walk(module):
        paths.setdefault(owner, path)
        block = next((one for one in (*above, owner) if one in blocks), module)
        names.add(path, owner)
        for _, parameter in own(path, owner._parameters):
            scopes_of.setdefault(parameter, set()).add(paths[block])
    parameters = names.parameters()
    # Blocks are not nested: the smallest scope that contains all users is one block, or the whole model.
    users = {name: scopes_of[parameter] for name, parameter in parameters.items()}
    scope_of = {name: next(iter(scopes)) if len(scopes) == 1 else "" for name, scopes in users.items()}
    units = flat_units(parameters, scope_of, kinds_of(parameters, dtypes_of(module, dtype, buffers), trained))
    names_of: dict[str, list[str]] = {"": []}
    for unit in units:
        names_of.setdefault(unit.scope, []).append(unit.name)
    scopes = tuple(Scope(path, tuple(names_of[path])) for path in paths.values() if path in names_of)
    return UnitPlan(scopes, units, tuple(names.buffers()), names.aliases())


class TensorNames:
    """All names of each parameter and buffer, in order of definition."""

    def __init__(self) -> None:
        self._parameters: dict[torch.Tensor, list[str]] = {}
        self._buffers: dict[torch.Tensor, list[str]] = {}

    def add(self, path: str, module: nn.Module) -> None:
        """Note a module's own tensors under the path at which it was found."""
        for found, tensors in ((self._parameters, module._parameters), (self._buffers, module._buffers)):
            for name, tensor in own(path, tensors):
                found.setdefault(tensor, []).append(name)

    def parameters(self) -> dict[str, torch.Tensor]:
        """First name -> parameter."""
        return {names[0]: parameter for parameter, names in self._parameters.items()}

    def buffers(self) -> dict[str, torch.Tensor]:
        """First name -> buffer."""
        return {names[0]: buffer for buffer, names in self._buffers.items()}

    def aliases(self) -> dict[str, str]:
        """For tensors with several names: each name, the first included -> the first."""
        several = [names for names in (*self._parameters.values(), *self._buffers.values()) if len(names) > 1]
        return {name: names[0] for names in several for name in names}


def kinds_of(
    parameters: Mapping[str, torch.Tensor],
    dtypes: Mapping[torch.Tensor, torch.dtype],
    trained: Collection[torch.Tensor] | None,
) -> dict[str, tuple[torch.dtype, bool]]:
    """The number format that each parameter will have, and whether it is trained; see :func:`find_units`."""
    known = set(parameters.values() if trained is None else trained)
    return {name: (dtypes[p], p.requires_grad and p in known) for name, p in parameters.items()}


def dtypes_of(
    module: nn.Module, dtype: torch.dtype | None, buffers: torch.dtype | None = None
) -> dict[torch.Tensor, torch.dtype]:
    """The number format that each parameter will have.

    Parameters of BatchNorm stay fp32 if its running statistics, which are buffers, are fp32: torch needs both in one
    format, and accepts 16-bit activations with either. If the user has made the statistics 16-bit, the parameters
    become 16-bit as all others.

    Args:
        dtype: of all other parameters; ``None``: all keep their own.
        buffers: of floating-point buffers; ``None``: they keep theirs.
    """
    found: dict[torch.Tensor, torch.dtype] = {p: dtype or p.dtype for p in module.parameters()}
    for one in module.modules() if dtype is not None else ():
        statistics = one.running_mean if isinstance(one, _BatchNorm) else None
        if statistics is not None and (buffers or statistics.dtype) == torch.float32:
            found |= dict.fromkeys(one.parameters(recurse=False), torch.float32)
    return found


def walk(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """All submodules in the order of ``named_modules``; a shared module occurs at each of its paths.

    Yields:
        (path, module, the modules that contain it, outermost first)
    """

    def below(path: str, one: nn.Module, above: tuple[nn.Module, ...]) -> Iterator:
        yield path, one, above
        for name, child in one._modules.items():
            if child is not None and child is not one and child not in above:  # a child may refer to its parent
                yield from below(f"{path}.{name}" if path else name, child, (*above, one))

    yield from below(prefix, module, ())


def own(path: str, tensors: Mapping[str, torch.Tensor | None]) -> Iterator[tuple[str, torch.Tensor]]:
    """(global name, tensor) of a module's own parameters or buffers; those that are None are left out."""
    for name, tensor in tensors.items():
        if tensor is not None:
            yield f"{path}.{name}" if path else name, tensor


def flat_units(
    parameters: Mapping[str, torch.Tensor], scope_of: Mapping[str, str], kinds: Mapping[str, tuple[torch.dtype, bool]]
) -> tuple[FlatUnit, ...]:
    """Group parameters, given in order of definition under their first names.

    Args:
        parameters: first name -> parameter.
        scope_of: first name -> path of its scope.
        kinds: first name -> (dtype, whether it is trained).
    """
    members: dict[tuple[str, torch.dtype, bool, str | None], list[str]] = {}
    for name, parameter in parameters.items():
        alone = name if not scope_of[name] and parameter.numel() >= MIN_OWN_UNIT else None
        members.setdefault((scope_of[name], *kinds[name], alone), []).append(name)
    groups = Counter(scope for scope, _, _, alone in members if alone is None)

    def name_of(scope: str, dtype: torch.dtype, trainable: bool, alone: str | None) -> str:
        kind = f" ({str(dtype).removeprefix('torch.')}{'' if trainable else ', frozen'})"
        return alone or (scope or "(root)") + (kind if groups[scope] > 1 else "")

    return tuple(
        FlatUnit(name_of(*key), scope, tuple(names), dtype, trainable)
        for key, names in members.items()
        for scope, dtype, trainable, _ in [key]
    )


def _named_blocks(module: nn.Module, classes: set[str]) -> Iterator[nn.Module]:
    return (one for _, one, above in walk(module) if above and type(one).__name__ in classes)


def _unknown_classes(module: nn.Module, classes: Collection[str]) -> Iterator[str]:
    below = [one for _, one, above in walk(module) if above]
    there = sorted({type(one).__name__ for one in below if _has_parameters(one) and _is_called(one)})
    for name in sorted(set(classes) - set(there)):
        if any(type(one).__name__ == name for one in below):
            yield f"modules of the class {name} have no parameters or no forward: name the class of blocks, of {there}"
        else:
            yield f"there is no module of the class {name} in the model; there are {there}"


def _repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    for _, container, _ in walk(module):
        elements = list(_elements(container))
        repeated = Counter(map(type, elements))
        yield from (one for one in elements if repeated[type(one)] > 1 and _may_be_block(one))


def _elements(container: nn.Module) -> Iterator[nn.Module]:
    """The elements of a container; an element that is never called, such as an inner list, is replaced by its own."""
    lists = isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict)
    for name, child in container._modules.items():
        if child is not None and (lists or name.isdecimal()):
            yield from [child] if _is_called(child) else _elements(child)


def _may_be_block(module: nn.Module) -> bool:
    inner = [child for name, child in module._modules.items() if name != "parametrizations"]
    single_layer = not inner and type(module).__module__.startswith("torch.nn.")
    return not single_layer and _has_parameters(module)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_called(module: nn.Module) -> bool:
    """Whether a module has a forward, before which its parameters can be gathered; a scripted one calls no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward
