"""Finds, in a first forward pass, which parameters a module reads outside of their own block's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptpar.engine.tensors import tensors_in


class ReadWatch(TorchDispatchMode):
    """Shows every tensor that an operator reads before it does.

    A block's parameters are brought before it is called. Whoever reads them at another time would find old values, or
    none at all, and has to be found. Compiled functions have no operators to look at, and one that is called first
    under a mode stays uncompiled for good: have them run uncompiled meanwhile.

    Args:
        look: is shown the tensors, and may bring what is not there.
    """

    def __init__(self, look: Callable[[torch.Tensor], None]):
        super().__init__()
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:
            for tensor in tensors_in((args, kwargs or {})):
                self._look(tensor)
        return func(*args, **(kwargs or {}))
