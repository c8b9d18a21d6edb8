"""Finds the modules and parameters that a function uses, by its code and the variables that it refers to. Pure."""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import nn

Used: TypeAlias = nn.Module | nn.Parameter

MAX_DEPTH = 4
"""Functions that call functions are followed so far."""


def modules_used(function: Any) -> dict[str, Used]:
    """Name -> a module with parameters or buffers, or a parameter, none of which contains another.

    Of ``self.embed.weight`` the parameter is used, of ``self.embed(x)`` the module ``embed``, of ``self.head(x)`` with
    a method ``head`` what the method uses; of ``self`` in other places, everything inside. Other tensors are not found.

    Args:
        function: a function, a method, a ``functools.partial`` or an object that can be called.
    """
    search = _Search()
    search.look(function)
    found: dict[str, Used] = {}
    covered: set[int] = set()
    for name, one in sorted(search.found.values(), key=lambda pair: -len(tensors_of(pair[1]))):
        if not covered >= (tensors := set(map(id, tensors_of(one)))):
            covered |= tensors
            found[_free_name(name, found)] = one
    return found


def tensors_of(used: Used) -> list[torch.Tensor]:
    """The parameters and buffers of a module; a parameter itself."""
    return [used] if isinstance(used, nn.Parameter) else [*used.parameters(), *used.buffers()]


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    while name in taken or hasattr(nn.Module, name) or name == "function":
        name += "_"
    return name


class _Search:
    """Follows a function's code; ``found`` has each object that it uses, by its identity, with its name."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[str, Used]] = {}
        self._seen: set[tuple[int, int]] = set()

    def look(self, function: Any, depth: int = 0) -> None:
        while isinstance(function, functools.partial):
            for number, value in enumerate((*function.args, *function.keywords.values())):
                self._take(f"argument{number}", value, depth)
            function = function.func
        if isinstance(function, MethodType):
            self._enter(function.__func__, (function.__self__,), depth)
        elif isinstance(function, FunctionType):
            self._enter(function, (), depth)
        elif isinstance(call := getattr(type(function), "__call__", None), FunctionType):  # noqa: B004
            self._enter(call, (function,), depth)

    def _enter(self, function: Any, bound: tuple[Any, ...], depth: int) -> None:
        """Follow a Python function whose first arguments are known."""
        if not isinstance(function, FunctionType) or _is_torchs(function) or depth > MAX_DEPTH:
            return
        key = id(function.__code__), id(bound[0]) if bound else 0
        if key in self._seen:
            return
        self._seen.add(key)
        code = function.__code__
        names = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        arguments = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        arguments |= (function.__kwdefaults__ or {}) | dict(zip(names, bound, strict=False))
        cells = {n: _contents(c) for n, c in zip(code.co_freevars, function.__closure__ or (), strict=True)}
        places = {"FAST": arguments, "DEREF": {**arguments, **cells}, "GLOBAL": function.__globals__}
        self._walk(code, places, depth)

    def _walk(self, code: CodeType, places: Mapping[str, Mapping[str, Any]], depth: int) -> None:
        """Follow code, given the values of its arguments (``FAST``), outer variables (``DEREF``) and globals."""
        for place, name, attributes in _chains(code):
            if name in places[place]:
                self._resolve(name, places[place][name], attributes, depth)
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                self._walk(inner, {**places, "FAST": {}}, depth)

    def _resolve(self, name: str, value: Any, attributes: list[str], depth: int) -> None:
        """Take what ``name.attribute.attribute`` is."""
        for attribute in attributes:
            if isinstance(value, nn.Parameter):
                break
            if isinstance(value, torch.Tensor):
                return
            own = vars(value) if hasattr(value, "__dict__") else {}
            if isinstance(value, nn.Module):
                own = {**own, **value._parameters, **value._buffers, **value._modules}
            if attribute not in own:
                method = getattr(type(value), attribute, None)
                if isinstance(value, nn.Module) and (_is_torchs(method) or attribute == "forward"):
                    break  # it may use anything
                self._enter(method, (value,), depth + 1)
                return
            name, value = attribute, own[attribute]
        self._take(name, value, depth)

    def _take(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module | nn.Parameter):
            if tensors_of(value):
                self.found.setdefault(id(value), (name, value))
        elif isinstance(value, list | tuple):
            for number, one in enumerate(value):
                self._take(f"{name}{number}", one, depth)
        elif isinstance(value, dict):
            for key, one in value.items():
                self._take(f"{name}_{key}".replace(".", "_"), one, depth)
        elif callable(value) and not isinstance(value, type | ModuleType | torch.Tensor):
            self.look(value, depth + 1)


def _chains(code: CodeType) -> Iterator[tuple[str, str, list[str]]]:
    """(``FAST``, ``DEREF`` or ``GLOBAL``, variable, attributes of attributes) of each variable that is read."""
    chain: tuple[str, str, list[str]] | None = None
    for one in dis.get_instructions(code):
        if chain is not None and one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            chain[2].append(one.argval)
            continue
        if chain is not None:
            yield chain
        chain = None
        place = next((place for place in ("FAST", "DEREF", "GLOBAL") if one.opname.startswith(f"LOAD_{place}")), None)
        if place is not None:
            *before, last = one.argval if isinstance(one.argval, tuple) else (one.argval,)
            for name in before:
                yield place, name, []
            chain = place, last, []


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_torchs(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"
