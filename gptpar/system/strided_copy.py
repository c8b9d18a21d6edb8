"""Copies elements on the host in the calling thread alone: csrc/strided_copy.cpp, or torch where that cannot."""

from __future__ import annotations

import ctypes
import functools

import torch

from gptpar.system import native

_CONVERSIONS = {(torch.bfloat16, torch.float32): 0, (torch.float32, torch.bfloat16): -1}
"""(target's number format, source's) -> what the helper takes in place of an element's bytes."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    if (library := native.load_if_possible("strided_copy")) is None:
        return None
    pointer, i32 = ctypes.c_void_p, ctypes.c_int32
    library.strided_copy.argtypes = [pointer, pointer, i32, pointer, pointer, pointer, i32]
    library.strided_copy.restype = i32
    return library


@torch.no_grad()
def copy_elements(target: torch.Tensor, source: torch.Tensor) -> None:
    """``target.copy_(source)`` of tensors of one shape, which share no memory.

    torch's copy wakes all of its threads, and takes a transposed matrix of a wide model six times as long. It still
    copies between devices, and converts between number formats other than fp32 and bf16.
    """
    kind = _kind(target, source)
    library = _library() if kind is not None and target.is_cpu and source.is_cpu else None
    if library is not None:
        numbers = ctypes.c_int64 * target.dim()
        shape, to, here = numbers(*target.shape), numbers(*target.stride()), numbers(*source.stride())
        unknown = library.strided_copy(target.data_ptr(), source.data_ptr(), target.dim(), shape, to, here, kind)
    if library is None or unknown:
        target.copy_(source)


def _kind(target: torch.Tensor, source: torch.Tensor) -> int | None:
    """What the helper calls these elements; ``None``: it does not know them."""
    if target.dtype == source.dtype:
        return target.itemsize
    return _CONVERSIONS.get((target.dtype, source.dtype))
