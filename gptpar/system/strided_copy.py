"""Copies elements on the host in the calling thread alone: csrc/strided_copy.cpp, or torch where that cannot."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable

import torch

from gptpar.system import native

_CONVERSIONS = {(torch.bfloat16, torch.float32): 0, (torch.float32, torch.bfloat16): -1}
"""(target's number format, source's) -> what the helper takes in place of an element's bytes."""

_WIDTHS = (1, 2, 4, 8)
"""Bytes of the elements that the helper copies."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    if (library := native.load_if_possible("strided_copy")) is None:
        return None
    library.strided_copies.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.strided_copies.restype = None
    return library


@torch.no_grad()
def copy_elements(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """``target.copy_(source)`` for each (target, source), of one shape each; no two tensors share memory.

    torch's copy wakes all of its threads, and takes a transposed matrix of a wide model six times as long. It still
    copies between devices, and converts between number formats other than fp32 and bf16. All other copies are one call,
    so that a thread waits once for Python's lock.
    """
    library, pairs = _library(), list(pairs)  # all alive until their memory has been copied
    numbers, count = list[int](), 0
    for target, source in pairs:
        width = None if library is None else _width(target, source)
        if width is None:
            target.copy_(source)
        else:
            numbers += (target.data_ptr(), source.data_ptr(), width, target.dim())
            numbers += (*target.shape, *target.stride(), *source.stride())
            count += 1
    if library is not None and count:
        library.strided_copies((ctypes.c_int64 * len(numbers))(*numbers), count)


def _width(target: torch.Tensor, source: torch.Tensor) -> int | None:
    """The helper's name for elements of this width; ``None``: it does not copy them."""
    assert target.shape == source.shape
    if not (target.is_cpu and source.is_cpu):
        return None
    if target.dtype != source.dtype:
        return _CONVERSIONS.get((target.dtype, source.dtype))
    return target.itemsize if target.itemsize in _WIDTHS else None
