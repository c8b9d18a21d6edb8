"""Finds, in a first forward pass, where a module reads parameters that are not there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gptpar.any_module.tensors import tensors_in
from gptpar.errors import GptparError


class AbsentParameters(TorchDispatchMode):
    """Watches every operator; one that reads a parameter whose memory was let go would read anything, or crash.

    Args:
        parameters: by name.
        is_present: whether a scope's parameters are there.
        scope_of: the identity of a parameter's storage -> its scope.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], is_present: Callable[[str], bool], scope_of: Mapping[int, str]
    ):
        super().__init__()
        self._parameters, self._is_present, self._scope_of = parameters, is_present, scope_of

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.detach.default:
            for tensor in tensors_in((args, kwargs or {})):
                self._check(tensor)
        return func(*args, **(kwargs or {}))

    def _check(self, tensor: torch.Tensor) -> None:
        scope = self._scope_of.get(tensor.untyped_storage()._cdata) if tensor.numel() else None
        if scope is None or self._is_present(scope):
            return
        place = int(tensor.storage_offset())
        storage = tensor.untyped_storage()._cdata
        names = [n for n, p in self._parameters.items() if p.untyped_storage()._cdata == storage and _holds(p, place)]
        name = names[0] if names else f"a parameter of {scope}"
        raise GptparError(
            f"{name} is read while {scope or 'the model'} is not being called: under ZeRO-3, or with parameters in "
            f"host memory, the parameters of {scope!r} are there during its own forward only. Read it inside "
            f'"with engine.gathered():", move the use into that module, make both one unit by naming the class of the '
            'module around them in {"gptpar": {"units": [...]}}, or use ZeRO stage 2.'
        )


def _holds(parameter: nn.Parameter, place: int) -> bool:
    start = int(parameter.storage_offset())
    return start <= place < start + max(parameter.numel(), 1)
