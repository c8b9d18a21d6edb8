"""Detects parameters that have left the engine's memory: it would train values that the model does not use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import eq, is_
from typing import Any

import torch
from torch import nn

from gptpar.errors import GptparError

MAX_NAMED = 4
RELEASED = (
    ", after which the parameters are released, and the change with them: nothing was updated. Change parameters after "
    "engine.step(), inside `with engine.gathered():`, or keep what the forward changes in buffers."
)


class MemoryWatch:
    """Compares the addresses of parameters with those of the engine's memory; it takes the host 0.2 us for each.

    There is no other way: ``.half()``, ``.data = ...`` and ``load_state_dict(assign=True)`` change no version of a
    tensor and call no hook.

    Args:
        parameters: by name, in the engine's memory.
        scopes: path -> module; together they have all parameters.
        transient: whether parameters have memory only while they are gathered. While they have none, it cannot be
            replaced (:mod:`gptpar.adapter.guards.read_guard`), so that it is enough to compare while they have.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], scopes: Mapping[str, nn.Module], *, transient: bool):
        names = {id(parameter): name for name, parameter in parameters.items()}
        self._scopes = scopes
        self._modules = _modules_of(self._scopes.values())
        self._known = set(names)
        self._structure = self._read_structure()
        places: dict[tuple[int, str], dict[str, nn.Parameter | None]] = {}
        for module in self._modules:
            own = module._parameters
            places |= {(id(module), local): own for local, parameter in own.items() if parameter is not None}
        self._locals, self._owners = [local for _, local in places], list(places.values())
        self._parameters = [owner[local] for owner, local in zip(self._owners, self._locals, strict=True)]
        self._names = [names[id(parameter)] for parameter in self._parameters]
        self._transient = transient
        self._addresses = [] if transient else self._read(torch.Tensor.data_ptr)
        self._storages = self._read(_storage)

    def _read(self, place_of: Callable[[Any], int]) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # avoids the guard of released parameters, which takes time
            return list(map(place_of, self._parameters))

    def _read_structure(self) -> tuple[list[nn.Module | None], list[int]]:
        """(all modules' children, how many parameters each module has); it takes the host 0.2 us for each module."""
        children = chain.from_iterable(map(dict.values, [one._modules for one in self._modules]))
        return list(children), list(map(len, [one._parameters for one in self._modules]))

    def _require_no_others(self) -> None:
        """Refuse trainable parameters that came into the model later."""
        found = {
            f"{path}.{name}" if path else name: parameter
            for path, module in self._scopes.items()
            for name, parameter in module.named_parameters()
        }
        others = [name for name, one in found.items() if one.requires_grad and id(one) not in self._known]
        if others:
            raise GptparError(
                f"{some_of(others)} came into the model after gptpar.initialize, so that nothing would train them: "
                "change the model before, or call engine.close(), then gptpar.initialize again."
            )
        self._structure = self._read_structure()

    def check(self) -> None:
        """Check that all parameters are the same objects and, if their memory stays, at the same addresses.

        Trainable parameters that the engine does not know are refused, too.

        Raises:
            GptparError: some are not; it names them.
        """
        now = map(dict.get, self._owners, self._locals)
        self._require(list(map(is_, now, self._parameters)))
        if not self._transient:
            self._require(list(map(eq, self._read(torch.Tensor.data_ptr), self._addresses)))
        if self._read_structure() != self._structure:
            self._require_no_others()

    def check_present(self) -> None:
        """The same check, and that of the storages, while all parameters are gathered."""
        self.check()
        self._require(list(map(eq, self._read(_storage), self._storages)))

    def _require(self, fine: list[bool]) -> None:
        if all(fine):
            return
        names = list(dict.fromkeys(name for name, is_fine in zip(self._names, fine, strict=True) if not is_fine))
        raise GptparError(
            f"{some_of(names)} left the engine's memory after gptpar.initialize, so that it "
            "would train other weights than the model has: .to(dtype), .half(), .float(), .data = ... and "
            "load_state_dict(assign=True) give parameters other memory. Change them in place (copy_(), "
            "load_state_dict() without assign), or call engine.close(), then gptpar.initialize again."
        )


def _modules_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Each module once, without those that torch.jit has compiled, which do not change."""
    modules = {id(one): one for root in roots for one in root.modules()}
    return [one for one in modules.values() if not isinstance(one, torch.jit.ScriptModule)]


def some_of(names: Sequence[str]) -> str:
    """The first of several names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def _storage(parameter: torch.Tensor) -> int:
    return parameter.untyped_storage()._cdata
