"""AdamW on the CPU in one pass over memory (csrc/cpu_adam.cpp), or through torch where there is no compiler."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptpar import native
from gptpar.errors import NativeBuildError
from gptpar.host import cores

_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum Type in csrc/cpu_adam_scalar.h
_SQUARE_BLOCK = 1 << 16


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one step.

    Attributes:
        step: how many steps there will have been after this one, at least 1. Bias corrections follow from it, so a
            resumed run goes on bit for bit.
        divisor: what gradients are divided by: loss scale times clipping. Beyond fp32's range nothing is left of them.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    divisor: float = 1.0


class _CStep(ctypes.Structure):
    """GptparAdamStep in csrc/cpu_adam.cpp, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("p", "m", "v", "p_out", "m_out", "v_out", "grad", "low")),
        ("n", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("grad_type", "low_type", "multiply")),
        *((name, ctypes.c_float) for name in ("scale", "rest1", "beta2", "rest2", "root", "eps", "step", "decay")),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = native.load("cpu_adam")
    except NativeBuildError as error:
        warnings.warn(f"the CPU optimizer uses torch's kernels, several times slower: {error}", stacklevel=3)
        return None
    i32, doubles = ctypes.c_int32, ctypes.POINTER(ctypes.c_double)
    library.cpu_adam_isa.argtypes = [i32]
    library.cpu_adam_isa.restype = ctypes.c_char_p
    library.cpu_adam_step.argtypes = [ctypes.POINTER(_CStep), i32, i32, i32, doubles]
    library.cpu_adam_order.argtypes = [ctypes.POINTER(_CStep), i32, i32, i32]
    library.cpu_adam_order.restype = ctypes.c_int64
    library.cpu_adam_wait.argtypes = [ctypes.c_int64, doubles]
    library.cpu_adam_square.argtypes = [ctypes.c_void_p, ctypes.c_int64, i32, i32, i32, doubles]
    return library


CORES_LEFT_FREE = 2
"""For the threads that launch the device's work: with one, the CPU optimizer held them up."""


def default_threads(mine: Sequence[int] | None = None) -> int:
    """All of these cores, by default those that this process may use, but a few that are left free; at least 1."""
    return max(1, len(cores() if mine is None else mine) - CORES_LEFT_FREE)


class CpuAdam:
    """AdamW (Loshchilov and Hutter 2019) over flat CPU tensors.

    The compiled kernel gives the same bits for every instruction set, number of threads and cutting of a vector into
    calls (which NaN comes out of several is left open). It releases the GIL, and does not record what it does for
    autograd.

    Args:
        threads: threads for each call; default: default_threads().

    Attributes:
        native: whether the compiled kernel is used. Otherwise one warning says why, and torch does the work.
    """

    _isa = -1  # the best that the processor has; tests compare the others

    def __init__(self, threads: int | None = None):
        if threads is not None and threads < 1:
            raise ValueError(f"CpuAdam needs at least 1 thread, not {threads}")
        self.threads = threads or default_threads()
        self._kernels = _library()

    @property
    def native(self) -> bool:
        return self._kernels is not None

    @property
    def isa(self) -> str:
        """The instruction set in use: ``scalar``, ``avx2`` or ``avx512``; ``torch`` without the compiled kernel."""
        return self._kernels.cpu_adam_isa(self._isa).decode() if self._kernels else "torch"

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
        return self.steps(p, m, v, grad, [(0, p.numel(), how)], into=into, low=low)

    def steps(
        self,
        p: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        stretches: Sequence[tuple[int, int, AdamStep]],
        *,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
        low: Tensor | None = None,
    ) -> bool:
        """One step; returns whether every gradient was finite (before the division by ``divisor``).

        Where one was not, the step is made all the same, as IEEE arithmetic has it: inf and NaN spread to the outputs
        of that element. Who wants to skip such steps passes ``into`` and drops it, or calls ``square`` first.

        Args:
            p, m, v: [n] contiguous fp32 on the CPU: parameters, first and second moment. With fp64, torch's own
                kernels are used.
            grad: [n] fp32, bf16 or fp16; fp64 with fp64 parameters.
            stretches: (first element, the one behind the last, numbers of the step for those), one after the other;
                elements between them stay as they are.
            into: where the new p, m and v go, while p, m and v stay as they are; default: in place.
            low: [n] bf16, fp16 or like p: gets the new parameters, rounded to nearest even. It may be ``grad`` itself,
                or lie in the same place.

        Raises:
            ValueError: naming every tensor and number that does not fit.
        """
        _check(p, m, v, grad, stretches, into, low)
        if self._kernels is None or p.dtype == torch.float64:
            return _torch_steps((p, m, v), grad, stretches, into or (p, m, v), low)
        calls = _calls((p, m, v, *(into or (p, m, v)), grad), low, stretches)
        return bool(_checked(self._kernels.cpu_adam_step(calls, len(calls), self.threads, self._isa, None)))

    def order(
        self,
        p: Tensor,
        m: Tensor,
        v: Tensor,
        grad: Tensor,
        stretches: Sequence[tuple[int, int, AdamStep]],
        *,
        into: tuple[Tensor, Tensor, Tensor] | None = None,
        low: Tensor | None = None,
    ) -> Ordered:
        """Begin :meth:`steps`, when those that were ordered before are done, and return at once.

        The next can be prepared meanwhile. Torch's kernels do their work when it is waited for.
        """
        _check(p, m, v, grad, stretches, into, low)
        if self._kernels is None or p.dtype == torch.float64:
            return Ordered(functools.partial(_timed, _torch_steps, (p, m, v), grad, stretches, into or (p, m, v), low))
        tensors = (p, m, v, *(into or (p, m, v)), grad)
        calls = _calls(tensors, low, stretches)
        ticket = _checked(self._kernels.cpu_adam_order(calls, len(calls), self.threads, self._isa))
        return Ordered(functools.partial(_wait_for, self._kernels, ticket, (*tensors, low)))

    def square(self, grad: Tensor) -> float:
        """Sum of squares in double precision, the same for any number of threads.

        Args:
            grad: [n] contiguous fp32, bf16, fp16 or fp64 on the CPU.

        Raises:
            ValueError: naming what does not fit.
        """
        problems = _problems_of("grad", grad, grad.numel(), (*_TYPES, torch.float64))
        if problems:
            raise ValueError("; ".join(problems))
        if self._kernels is None or grad.dtype == torch.float64:
            blocks = (block.double().numpy() for block in grad.detach().split(_SQUARE_BLOCK))
            return float(sum(float(np.square(block).sum()) for block in blocks))
        total = ctypes.c_double()
        kind = _TYPES[grad.dtype]
        _checked(
            self._kernels.cpu_adam_square(
                grad.data_ptr(), len(grad), kind, self.threads, self._isa, ctypes.byref(total)
            )
        )
        return total.value


@dataclass(frozen=True)
class Ordered:
    """Work under way; ``wait``, called once, returns at its end: (every gradient was finite, seconds it took)."""

    wait: Callable[[], tuple[bool, float]]


def _wait_for(library: ctypes.CDLL, ticket: int, _in_use: tuple[Tensor | None, ...]) -> tuple[bool, float]:
    seconds = ctypes.c_double()
    finite = bool(_checked(library.cpu_adam_wait(ticket, ctypes.byref(seconds))))
    return finite, seconds.value


def _timed(work: Callable[..., bool], *arguments: Any) -> tuple[bool, float]:
    started = time.perf_counter()
    finite = work(*arguments)
    return finite, time.perf_counter() - started


def _checked(code: int) -> int:
    if code == -3:
        raise MemoryError("the CPU optimizer could not allocate its sums")
    if code < 0:
        raise ValueError(f"the CPU optimizer's kernel refused its arguments (code {code})")
    return code


def _calls(
    tensors: Sequence[Tensor], low: Tensor | None, stretches: Sequence[tuple[int, int, AdamStep]]
) -> ctypes.Array[_CStep]:
    """The kernel's arguments; ``tensors`` are p, m, v, their outputs and the gradient."""
    places = [(t.data_ptr(), t.element_size()) for t in (*tensors, *([] if low is None else [low]))]
    types = _TYPES[tensors[-1].dtype], 0 if low is None else _TYPES[low.dtype]
    calls = []
    for start, stop, how in stretches:
        addresses = [base + start * size for base, size in places]
        calls.append(_call((*addresses, None)[:8], stop - start, types, how))
    return (_CStep * len(calls))(*calls)


def _call(addresses: Sequence[int | None], length: int, types: tuple[int, int], how: AdamStep) -> _CStep:
    """Numbers are computed in double precision and rounded to fp32 once, by ctypes."""
    exact = math.frexp(how.divisor)[0] == 0.5 and 2.0**-100 < how.divisor < 2.0**100  # a power of 2: multiply instead
    return _CStep(
        *addresses,
        n=length,
        grad_type=types[0],
        low_type=types[1],
        multiply=exact,
        scale=1 / how.divisor if exact else how.divisor,
        rest1=1 - how.beta1,
        beta2=how.beta2,
        rest2=1 - how.beta2,
        root=math.sqrt(1 - how.beta2**how.step),
        eps=how.eps,
        step=how.lr / (1 - how.beta1**how.step),
        decay=1 - how.lr * how.weight_decay,
    )


def _torch_steps(
    state: Sequence[Tensor],
    grad: Tensor,
    stretches: Sequence[tuple[int, int, AdamStep]],
    into: Sequence[Tensor],
    low: Tensor | None,
) -> bool:
    finite = True
    for start, stop, how in stretches:
        old, new = ([t[start:stop] for t in of] for of in (state, into))
        finite &= _torch_step(old, grad[start:stop], how, new, None if low is None else low[start:stop])
    return finite


@torch.no_grad()
def _torch_step(
    state: Sequence[Tensor], grad: Tensor, how: AdamStep, into: Sequence[Tensor], low: Tensor | None
) -> bool:
    for old, new in zip(state, into, strict=True):
        new.copy_(old)
    finite = bool(grad.isfinite().all())
    # Divided here, not by the fused kernel: that one would write the quotient back into the caller's gradient.
    grad = grad.to(into[0].dtype) / torch.tensor(how.divisor, dtype=into[0].dtype)
    torch._fused_adamw_(
        [into[0]],
        [grad],
        [into[1]],
        [into[2]],
        [],
        [torch.tensor(float(how.step))],
        lr=how.lr,
        beta1=how.beta1,
        beta2=how.beta2,
        weight_decay=how.weight_decay,
        eps=how.eps,
        amsgrad=False,
        maximize=False,
    )
    if low is not None:
        low.copy_(into[0])
    return finite


def _check(
    p: Tensor,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    stretches: Sequence[tuple[int, int, AdamStep]],
    into: tuple[Tensor, Tensor, Tensor] | None,
    low: Tensor | None,
) -> None:
    state = p.dtype if p.dtype == torch.float64 else torch.float32
    low_types = (torch.bfloat16, torch.float16, state)
    inputs = {"p": p, "m": m, "v": v}
    outputs = {f"into[{i}]": t for i, t in enumerate(into)} if into else dict(inputs)
    problems = []
    for name, tensor in {**inputs, **outputs}.items():
        problems += _problems_of(name, tensor, p.numel(), (state,))
    problems += _problems_of("grad", grad, p.numel(), (state,) if state == torch.float64 else (*_TYPES,))
    if low is not None:
        problems += _problems_of("low", low, p.numel(), low_types)
        outputs["low"] = low
    if not problems:
        problems += _overlaps({**inputs, "grad": grad}, outputs)
    end = 0
    for start, stop, _ in stretches:
        if not end <= start <= stop <= p.numel():
            problems.append(f"elements {start} to {stop} do not lie between {end} and {p.numel()}")
        end = stop
    for how in dict.fromkeys(how for *_, how in stretches):
        problems += _problems_of_numbers(how)
    if problems:
        raise ValueError("; ".join(problems))


def _problems_of_numbers(how: AdamStep) -> list[str]:
    problems = [
        f"{name} is {value}, not in [0, 1)"
        for name, value in (("beta1", how.beta1), ("beta2", how.beta2))
        if not 0 <= value < 1
    ]
    if how.step < 1:
        problems.append(f"step is {how.step} and not at least 1")
    problems += [
        f"{name} is {value}, not finite and at least 0"
        for name, value in (("lr", how.lr), ("eps", how.eps), ("weight_decay", how.weight_decay))
        if not 0 <= value < math.inf
    ]
    if not how.divisor >= 1e-37:
        problems.append(f"divisor is {how.divisor}, not at least 1e-37, as fp32 needs it")
    return problems


def _problems_of(name: str, tensor: Tensor, length: int, dtypes: tuple[torch.dtype, ...]) -> list[str]:
    problems = []
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(t).removeprefix("torch.") for t in dtypes)
        problems.append(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not {wanted}")
    if tensor.dim() != 1 or tensor.numel() != length:
        problems.append(f"{name} has the shape {tuple(tensor.shape)}, not ({length},)")
    if tensor.device.type != "cpu":
        problems.append(f"{name} is on {tensor.device}, not on the CPU")
    elif not tensor.is_contiguous():
        problems.append(f"{name} is not contiguous: its strides are {tensor.stride()}")
    return problems


def _overlaps(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> list[str]:
    """Outputs that share memory with another tensor: the order of reads and writes would decide what they hold.

    An output may lie exactly where the state that it replaces does, and the low-precision parameters where the
    gradient does: each element is read before it is written.
    """
    own = dict(zip(outputs, inputs, strict=False))  # new p, m, v and low -> p, m, v and grad
    places = {n: (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for n, t in {**inputs, **outputs}.items()}
    ordered = sorted(places.values())
    if all(before[1] <= after[0] for before, after in itertools.pairwise(ordered)):
        return []
    problems = []
    for name, (start, stop) in ((n, places[n]) for n in outputs):
        for other, (first, last) in places.items():
            same = other == name or (other == own[name] and (first, last) == (start, stop))
            if not same and first < stop and start < last:
                problems.append(f"{name} overlaps {other} by {min(stop, last) - max(start, first)} bytes")
    return problems
