"""Finds the parameters that a module reads outside of their own block's forward, or changes, in its first pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptpar.engine.tensors import tensors_in


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
