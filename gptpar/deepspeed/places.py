"""Makes DeepSpeed's modules out of the lists in :mod:`gptpar.deepspeed.names`, when a program imports them."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from gptpar.deepspeed.names import ABSENT, EVERYTHING_OF, HOMES, LIST, PLACES, REFUSED
from gptpar.errors import GptparError

_NAMES = {place: frozenset(names.split()) for place, names in PLACES.items()}
_REFUSALS = {name: sentence for sentence, names in REFUSED.items() for name in names.split()}


def serve(root: str) -> None:
    """Let ``import ROOT.zero`` and the others find DeepSpeed's modules.

    Args:
        root: a package's name, ``gptpar.deepspeed`` or ``deepspeed``.
    """
    sys.meta_path.append(_Finder(root))


def found(root: str, place: str, name: str) -> Any:
    """A module's attribute: one of its names, or a module inside.

    Args:
        root: see :func:`serve`.
        place: the module's name behind the root's; empty: the root.

    Raises:
        AttributeError: DeepSpeed's module of this place has no such name here.
    """
    inside = f"{place}.{name}" if place else name
    if name in _NAMES.get(place, ()):
        return _refused(name) if name in _REFUSALS else _at_home(HOMES[name])
    if _is_place(inside):
        return importlib.import_module(f"{root}.{inside}")
    if place in EVERYTHING_OF and not name.startswith("__"):
        home = importlib.import_module(EVERYTHING_OF[place])
        if hasattr(home, name):
            return getattr(home, name)
    module = f"{root}.{place}" if place else root
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}; gptpar/deepspeed/deepspeed.toml lists the names of DeepSpeed "
        "that gptpar has"
    )


def _is_place(place: str) -> bool:
    return any(known == place or known.startswith(f"{place}.") for known in PLACES)


def _at_home(home: str) -> Any:
    module, _, attribute = home.partition(":")
    return getattr(importlib.import_module(module), attribute) if attribute else importlib.import_module(module)


@functools.cache
def _refused(name: str) -> type:
    """A class that can be imported and asked about, and raises when it is called."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise GptparError(f"deepspeed's {name} is not in gptpar: {_REFUSALS[name]}")

    return type(name, (), {"__new__": refuse, "apply": staticmethod(refuse), "__doc__": _REFUSALS[name]})


class _Place(ModuleType):
    """A module of DeepSpeed; its names are looked up when they are used."""

    _root: str
    _inside: str

    def __getattr__(self, name: str) -> Any:
        value = found(self._root, self._inside, name)
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_NAMES.get(self._inside, ())})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules behind a root; it comes last, so that it finds nothing that is a file."""

    def __init__(self, root: str):
        self._root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        inside = name.removeprefix(f"{self._root}.")
        if inside == name:
            return None
        if not _is_place(inside):
            for place, remedy in ABSENT.items():
                if f"{inside}.".startswith(f"{place}."):
                    raise ModuleNotFoundError(f"{name} is not in gptpar: {remedy}", name=name)
            return None
        spec = importlib.machinery.ModuleSpec(name, self, origin=str(LIST), is_package=True)
        spec.has_location = True  # so that Python names the list where a program imports a name that is not in it
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Place(spec.name)
        module._root, module._inside = self._root, spec.name.removeprefix(f"{self._root}.")
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the names are looked up when they are used."""
