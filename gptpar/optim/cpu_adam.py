"""AdamW and Muon's elementwise parts on the CPU in one pass (csrc/cpu_adam.cpp), and the number of threads."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptpar.optim.adam_arguments import GRAD_TYPES, AdamStep, check_arguments, problems_of_tensors
from gptpar.optim.adam_update import STATES, AdamHyperparameters, change
from gptpar.optim.elementwise import Done, update
from gptpar.optim.matrix_update import MatrixUpdate
from gptpar.optim.rounded_states import FP8, KEPT_IN
from gptpar.optim.torch_kernels import GroupNumbers, MatrixHostKernel, clear_between, square_by_blocks, timed
from gptpar.system import native
from gptpar.system.host import cores

_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum Type in csrc/cpu_adam_scalar.h
_MOMENT_TYPES = _TYPES | {FP8: 4}
_NO_MEMORY, _NOT_ASCENDING, _NOT_YET = -3, -4, -5  # enum Error in csrc/cpu_adam.cpp

# struct packs twice as fast as ctypes' structures. That matters, because each bucket's call comes with cold caches.
_STEP = struct.Struct("8P4i7f4xI4x")  # GptparAdamStep in csrc/cpu_adam.cpp, field by field
_BLEND = struct.Struct("8P4i7fi8x")  # the same without m and v
_UNUSED = (1, 1)  # types of m and v
_RANGE = struct.Struct("3q")  # GptparGroupRange in csrc/blocks.h


class _Kernels(NamedTuple):
    """The library of kernels, loaded in two ways.

    Attributes:
        lasting: a call releases Python's lock.
        brief: a call keeps the lock, because getting it back from a busy training loop takes longer than the call.
    """

    lasting: ctypes.CDLL
    brief: ctypes.PyDLL


@functools.cache
def _library() -> _Kernels | None:
    lasting = native.load_or_warn("cpu_adam", "the CPU optimizer uses torch's operators, several times slower")
    if lasting is None:
        return None
    kernels = _Kernels(lasting, ctypes.PyDLL(lasting._name, handle=lasting._handle))
    i32, i64, doubles = ctypes.c_int32, ctypes.c_int64, ctypes.POINTER(ctypes.c_double)
    what: list[Any] = [ctypes.c_char_p, i32, ctypes.c_char_p, i64, ctypes.c_void_p, i64]
    lasting.cpu_adam_isa.argtypes = [i32]
    lasting.cpu_adam_isa.restype = ctypes.c_char_p
    lasting.cpu_adam_step.argtypes = [*what, i32, i32]
    lasting.cpu_adam_wake.argtypes, lasting.cpu_adam_wake.restype = [], None
    lasting.cpu_adam_square.argtypes = [ctypes.c_void_p, i64, i32, i32, i32, doubles]
    kernels.brief.cpu_adam_order.argtypes = [*what, i32, i32]
    kernels.brief.cpu_adam_order_square.argtypes = lasting.cpu_adam_square.argtypes
    kernels.brief.cpu_adam_order.restype = kernels.brief.cpu_adam_order_square.restype = i64
    for library in kernels:
        library.cpu_adam_wait.argtypes = [i64, i32, doubles, doubles]
    return kernels


CORES_LEFT_FREE = 2
"""Cores for the threads that launch the device's kernels and order updates: with a single one, they were delayed."""

SHARE_LEFT_FREE = 5
"""One core in five is left free if that is more than CORES_LEFT_FREE. On 16 cores, 14 threads updated up to 4 % faster
than 13, but the steps were no shorter, and longer on a busy host; 15 threads took a quarter more time."""


def default_threads(mine: Sequence[int] | None = None) -> int:
    """Number of threads for these cores (default: this process's), with a few cores left free; at least 1."""
    count = len(cores() if mine is None else mine)
    return max(1, count - max(CORES_LEFT_FREE, count // SHARE_LEFT_FREE))


class CpuAdam:
    """AdamW over flat CPU tensors, as :mod:`gptpar.optim.adam_update` defines it.

    The result does not depend, in any bit, on the instruction set, the number of threads, the division of a vector into
    calls, or whether the compiled kernel is used (except for the payload of a NaN). The kernel releases the GIL and is
    not recorded by autograd.

    Args:
        threads: threads for each call; default: default_threads().
        rounded: states that are kept in 16 or 8 bits -> their dtype (:mod:`gptpar.optim.rounded_states`).

    Attributes:
        native: whether the compiled kernel is used. Otherwise one warning says why, and torch does the work.
    """

    states: tuple[str, ...] = STATES

    _isa = -1  # the best that the processor has; tests compare the others

    def __init__(self, threads: int | None = None, rounded: Mapping[str, torch.dtype] = MappingProxyType({})):
        if threads is not None and threads < 1:
            raise ValueError(f"CpuAdam needs at least 1 thread, not {threads}")
        self.rounded = rounded
        self.threads = threads or default_threads()
        self._kernels = _library()

    @property
    def native(self) -> bool:
        return self._kernels is not None

    @property
    def isa(self) -> str:
        """The instruction set in use: ``scalar``, ``avx2`` or ``avx512``; ``torch`` without the compiled kernel."""
        return self._kernels.lasting.cpu_adam_isa(self._isa).decode() if self._kernels else "torch"

    def step_of(self, how: AdamHyperparameters, step: int, divisor: float) -> AdamStep:
        """The argument of :meth:`order` for one group's elements."""
        return AdamStep(*how, step, divisor)

    def step(
        self,
        p: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        how: AdamStep,
        *,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
        low: Tensor | None = None,
    ) -> bool:
        """:meth:`steps` with the same numbers for all elements."""
        return self.steps((p, m, v), grad, [(0, p.numel(), how)], into=into, low=low)

    def steps(
        self,
        state: Sequence[Tensor],
        grad: Tensor,
        ranges: Sequence[tuple[int, int, AdamStep]],
        *,
        into: Sequence[Tensor] | None = None,
        low: Tensor | None = None,
        only: np.ndarray | None = None,
    ) -> bool:
        """Take one step; returns whether every gradient was finite (before the division by ``divisor``).

        A gradient that is not finite makes its own element's outputs inf or NaN. To skip such a step, pass ``into`` and
        drop it, or call ``square`` first.

        Args:
            state: [n] p, m and v, contiguous fp32 on the CPU: parameters, first and second moment. With fp64, torch's
                operators are used. Moments may have a dtype of :data:`KEPT_IN`: then they are rounded.
            grad: [n] fp32, bf16 or fp16; with fp64 parameters, fp64 as well.
            ranges: (start, stop, the step's numbers), ascending; elements between the ranges do not change.
            into: memory for the new p, m and v; the old ones do not change. Default: in place.
            low: [n] gets the new parameters, rounded to nearest even, in any dtype of a gradient. It may be ``grad``.
            only: [ranges, 2] int64, contiguous: (start, stop), ascending and disjoint, of the elements whose outputs
                are needed; default: all. Outputs elsewhere are valid already, or will be written later. Torch's
                operators update all elements.

        Raises:
            ValueError: names every tensor and number that does not fit.
        """
        check_arguments(state, grad, ranges, into, low, only)
        if self._kernels is None or state[0].dtype == torch.float64:
            return _torch_steps(state, grad, ranges, into or state, low)
        call = _call((*state, *(into or state), grad), low, ranges, only)
        return bool(_checked(self._kernels.lasting.cpu_adam_step(*call, self.threads, self._isa)))

    def order(
        self,
        state: Sequence[Tensor],
        grad: Tensor,
        ranges: Sequence[tuple[int, int, AdamStep]],
        *,
        into: Sequence[Tensor] | None = None,
        low: Tensor | None = None,
        only: np.ndarray | None = None,
    ) -> Callable[[], Done]:
        """Put :meth:`steps` into a queue, and return at once, so that the caller can prepare the next order.

        Returns:
            A call that waits for the end; to be called once. Without the compiled kernel it does the work itself.
        """
        check_arguments(state, grad, ranges, into, low, only)
        if self._kernels is None or state[0].dtype == torch.float64:
            work = functools.partial(_torch_steps, state, grad, ranges, into or state, low)
            return functools.partial(timed, work)
        tensors = (*state, *(into or state), grad)
        call = _call(tensors, low, ranges, only)
        ticket = _checked(self._kernels.brief.cpu_adam_order(*call, self.threads, self._isa))
        return functools.partial(_wait_for, self._kernels, ticket, (*tensors, low, only))

    def wake(self) -> None:
        """Begin to wake the kernel's threads: an order will come within a fraction of a millisecond."""
        if self._kernels is not None:
            self._kernels.lasting.cpu_adam_wake()

    def square(self, grad: Tensor) -> float:
        """Sum of squares in double precision, the same for any number of threads.

        Args:
            grad: [n] contiguous fp32, bf16, fp16 or fp64 on the CPU.

        Raises:
            ValueError: says what is wrong with ``grad``.
        """
        problems = problems_of_tensors([("grad", grad, (*GRAD_TYPES, torch.float64))], grad.numel())
        if problems:
            raise ValueError("; ".join(problems))
        if self._kernels is None or grad.dtype == torch.float64:
            return square_by_blocks(grad)
        total = ctypes.c_double()
        kind = _TYPES[grad.dtype]
        _checked(
            self._kernels.lasting.cpu_adam_square(
                grad.data_ptr(), len(grad), kind, self.threads, self._isa, ctypes.byref(total)
            )
        )
        return total.value


class CpuMuon(MatrixHostKernel):
    """The elementwise parts of a matrix update whose first one is Muon's average, over flat CPU tensors.

    Both are a product and a sum with the new value of one vector, which the compiled kernel does in one pass::

        m = momentum * m + (1 - momentum) * (scale * grad)        the average
        p = decay * p - lr * direction                            the weights

    The result is that of torch's operators, bit for bit, which do the work in fp64 and without the compiled kernel.

    Args:
        nesterov: whether ``(1 - momentum) * (scale * grad) + momentum * m`` with the new m is to be orthogonalized, and
            not m.
    """

    _isa = -1

    def __init__(self, optimizer: MatrixUpdate, threads: int, *, nesterov: bool):
        super().__init__(optimizer, threads)
        self._nesterov, self._kernels = nesterov, _library()

    def order_average(
        self, momentum: Tensor, grad: Tensor, ranges: Sequence[tuple[int, int, GroupNumbers]], out: Tensor
    ) -> Callable[[], Done]:
        if not self._takes(momentum, grad, out):
            return super().order_average(momentum, grad, ranges, out)
        clear_between(ranges, out)
        return self._order(momentum, momentum, grad, out, [(*one[:2], _average_numbers(one[2])) for one in ranges])

    def order(
        self,
        state: Sequence[Tensor],
        grad: Tensor,
        ranges: Sequence[tuple[int, int, GroupNumbers]],
        *,
        into: Sequence[Tensor] | None = None,
        low: Tensor | None = None,
        only: np.ndarray | None = None,
    ) -> Callable[[], Done]:
        ((weights,), (new,)) = state, into or state
        if low is None or only is not None or not self._takes(weights, grad, low):
            return super().order(state, grad, ranges, into=into, low=low, only=only)
        return self._order(weights, new, grad, low, [(*one[:2], _follow_numbers(one[2])) for one in ranges])

    def _takes(self, vector: Tensor, grad: Tensor, low: Tensor) -> bool:
        known = grad.dtype in _TYPES and low.dtype in _TYPES
        return self._kernels is not None and vector.dtype == torch.float32 and known

    def _order(
        self, old: Tensor, new: Tensor, grad: Tensor, low: Tensor, ranges: Sequence[tuple[int, int, _BlendNumbers]]
    ) -> Callable[[], Done]:
        """Put a pass into the queue; the numbers are (scale, share, decay)."""
        assert self._kernels is not None
        addresses = (old.data_ptr(), 0, 0, new.data_ptr(), 0, 0, grad.data_ptr(), low.data_ptr())
        types, steps = (_TYPES[grad.dtype], _TYPES[low.dtype], *_UNUSED), []
        for _, _, (scale, share, decay, ahead) in ranges:
            steps.append(_BLEND.pack(*addresses, *types, scale, share, 0, 0, 0, 0, decay, ahead and self._nesterov))
        where = b"".join(_RANGE.pack(start, stop, i) for i, (start, stop, _) in enumerate(ranges))
        call = b"".join(steps), len(ranges), where, len(ranges), None, 0
        ticket = _checked(self._kernels.brief.cpu_adam_order(*call, self.threads, self._isa))
        return functools.partial(_wait_for, self._kernels, ticket, (old, new, grad, low))

    def wake(self) -> None:
        if self._kernels is not None:
            self._kernels.lasting.cpu_adam_wake()


def order_sum(total: Tensor, old: Tensor, addend: Tensor, threads: int) -> Callable[[], Done]:
    """Put ``total = old + addend`` into the kernels' queue, as :meth:`CpuAdam.order` does with a step.

    Args:
        total, old: [n] contiguous fp32 on the CPU, the same vector or ones that do not overlap; with fp64, torch adds.
        addend: [n] fp32, bf16 or fp16.
    """
    kernels = _library()
    if kernels is None or total.dtype != torch.float32:
        return functools.partial(timed, lambda: bool(torch.add(old, addend, out=total).isfinite().all()))
    addresses = (old.data_ptr(), 0, 0, total.data_ptr(), 0, 0, addend.data_ptr(), 0)
    step = _BLEND.pack(*addresses, _TYPES[addend.dtype], 0, *_UNUSED, 1.0, 1.0, 0, 0, 0, 0, 1.0, False)
    ticket = _checked(kernels.brief.cpu_adam_order(step, 1, _RANGE.pack(0, len(total), 0), 1, None, 0, threads, -1))
    return functools.partial(_wait_for, kernels, ticket, (total, old, addend))


def order_square(values: Tensor, threads: int) -> Callable[[], float]:
    """Put the sum of squares of a vector into the kernels' queue; the result is that of :meth:`CpuAdam.square`.

    Args:
        values: [n] contiguous fp32 on the CPU; with fp64, torch computes it.
    """
    kernels = _library()
    if kernels is None or values.dtype != torch.float32:
        return functools.partial(square_by_blocks, values)
    total = ctypes.c_double()
    kind, place = _TYPES[values.dtype], ctypes.byref(total)
    order = kernels.brief.cpu_adam_order_square
    ticket = _checked(order(values.data_ptr(), len(values), kind, threads, CpuAdam._isa, place))

    def square() -> float:
        _wait_for(kernels, ticket, (values,))
        return total.value

    return square


_BlendNumbers = tuple[float, float, float, bool]
"""(scale, share, decay, whether the pass is the average)"""


def _average_numbers(numbers: GroupNumbers) -> _BlendNumbers:
    _, momentum, rest = numbers.own
    return float(numbers.scale), float(rest), float(momentum), True


def _follow_numbers(numbers: GroupNumbers) -> _BlendNumbers:
    return 1.0, -float(numbers.own[0]), float(numbers.decay), False


def _wait_for(kernels: _Kernels, ticket: int, _in_use: tuple[object, ...]) -> Done:
    begin, end = ctypes.c_double(), ctypes.c_double()
    times = ctypes.byref(begin), ctypes.byref(end)
    code = kernels.brief.cpu_adam_wait(ticket, False, *times)
    if code == _NOT_YET:
        code = kernels.lasting.cpu_adam_wait(ticket, True, *times)
    return Done(bool(_checked(code)), begin.value, end.value)


def _checked(code: int) -> int:
    if code == _NO_MEMORY:
        raise MemoryError("the CPU optimizer could not allocate its sums")
    if code == _NOT_ASCENDING:
        raise ValueError("the ranges of only are not in ascending order")
    if code < 0:
        raise ValueError(f"the CPU optimizer's kernel refused its arguments (code {code})")
    return code


def _call(
    tensors: Sequence[Tensor],
    low: Tensor | None,
    ranges: Sequence[tuple[int, int, AdamStep]],
    only: np.ndarray | None = None,
) -> tuple[bytes, int, bytes, int, int | None, int]:
    """The kernel's arguments.

    Args:
        tensors: p, m, v, their three outputs, and the gradient.
    """
    addresses = [t.data_ptr() for t in tensors]
    addresses.append(0 if low is None else low.data_ptr())
    _, m, v, *_, grad = tensors
    types = _TYPES[grad.dtype], 0 if low is None else _TYPES[low.dtype], _MOMENT_TYPES[m.dtype], _MOMENT_TYPES[v.dtype]
    rounds = not {m.dtype, v.dtype}.isdisjoint(KEPT_IN.values())
    # Lists: a generator's every item would be a call of its own.
    steps = b"".join([_STEP.pack(*addresses, *types, *how.numbers, how.key if rounds else 0) for *_, how in ranges])
    where = b"".join([_RANGE.pack(start, stop, i) for i, (start, stop, _) in enumerate(ranges)])
    kept_to, num_kept_to = (None, 0) if only is None else (only.ctypes.data, len(only))
    return steps, len(ranges), where, len(ranges), kept_to, num_kept_to


def _torch_steps(
    state: Sequence[Tensor],
    grad: Tensor,
    ranges: Sequence[tuple[int, int, AdamStep]],
    into: Sequence[Tensor],
    low: Tensor | None,
) -> bool:
    finite = True
    for start, stop, how in ranges:
        old, new = ([t[start:stop] for t in of] for of in (state, into))
        here, narrow, n = grad[start:stop], None if low is None else low[start:stop], how.numbers
        finite &= bool(here.isfinite().all())
        update(change, old, here, n.scale, n.decay, n.own, into=new, low=narrow, key=how.key)
    return finite
