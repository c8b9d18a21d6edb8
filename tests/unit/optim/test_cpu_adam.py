"""AdamW on the CPU: right against fp64 and torch, the same bits on every path, and no argument is taken silently."""

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from gptpar.offload.buckets import ranges_of_rows
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.rounded_states import BF16, FP8
from tests.unit.optim.cpu_adam_runs import GRADS, HOW, make, run, same, with_isa
from tests.unit.optim.update_cases import kept, update


@pytest.mark.slow
def test_threads_places_and_instruction_sets_do_not_change_a_long_vector(isas):
    tensors = make(1000003, torch.bfloat16)
    _, scalar = run(with_isa(0), tensors, low=torch.bfloat16)
    squares = {with_isa(isa, threads).square(tensors[3]) for isa in isas for threads in (1, 2, 5)}
    assert len(squares) == 1
    assert squares.pop() == pytest.approx(float(tensors[3].double().square().sum()), rel=1e-13)
    for isa, threads, apart in itertools.product(isas, (1, 2, 5), (False, True)):
        _, ours = run(with_isa(isa, threads), tensors, apart=apart, low=torch.bfloat16)
        assert same(ours, scalar), (isa, threads, apart)


def placed(length, shift, dtype):
    """Memory for a vector that begins some elements behind where allocations do."""
    return torch.empty(length + 16, dtype=dtype)[shift : shift + length]


@pytest.mark.parametrize(
    ("shifts", "moments"),
    [
        *((shifts, torch.float32) for shifts in ((0, 0, 0, 0), (1, 1, 1, 1), (3, 5, 8, 1), (16, 16, 16, 7))),
        *(((3, 5, 8, 1), moments) for moments in (BF16, FP8)),
    ],
)
def test_any_cutting_and_any_alignment_gives_the_same_bits(isas, shifts, moments):
    """Also of moments that are rounded: their draws do not depend on where an element lies."""
    cuts = [0, 1, 38, 64, 70, 65601, 65602, 131139, 200003]
    p, m, v, grad = make(cuts[-1], torch.bfloat16)
    tensors = [p, *((m, v) if moments == torch.float32 else kept(m, v, (moments, moments)))]
    dtypes = (torch.float32, moments, moments)
    _, whole = run(CpuAdam(1), [*tensors, grad], low=torch.float16)
    for isa, apart in itertools.product(isas, (False, True)):
        state, into = ([placed(cuts[-1], *one) for one in zip(shifts[:3], dtypes, strict=True)] for _ in range(2))
        low = placed(cuts[-1], shifts[3], torch.float16)
        for piece, source in zip(state, tensors, strict=True):
            piece.copy_(source)
        for first, last in itertools.pairwise(cuts):
            p, m, v, part, *new = (t[first:last] for t in (*state, grad, *into))
            with_isa(isa, 2).step(p, m, v, part, HOW, into=tuple(new) if apart else None, low=low[first:last])
        assert same([*(into if apart else state), low], whole), (isa, apart)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_are_rounded_as_torch_does(isas, kind):
    """Every upper half with ties, their neighbours and all kinds of NaN, infinity, denormal and overflow."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    patterns = torch.cat([upper + rest for rest in (0, 1, 0x7FFF, 0x8000, 0x8001, 0x1000, 0x3000, 0x2FFF, 0xF000)])
    p = patterns.to(torch.int32).view(torch.float32)
    zeros = torch.zeros_like(p)
    for isa in isas:
        how = replace(HOW, lr=0.0, weight_decay=0.0)
        finite, (new, _, _, low) = run(with_isa(isa), [p, zeros, zeros, zeros], how, low=kind)
        assert finite and same([new, low], [p, p.to(kind)])
    assert p.isnan().any() and low[p == 65520.0].isinf().all() == (kind == torch.float16)


@pytest.mark.parametrize("grad", GRADS)
def test_a_gradient_that_is_not_finite_is_found_wherever_it_is(isas, grad):
    n = 65536 + 45
    tensors = make(n, grad)
    for isa in isas:
        _, clean = run(with_isa(isa), tensors)
        for place, bad in ((0, math.nan), (20, math.inf), (65535, -math.inf), (65536, math.nan), (n - 1, math.inf)):
            spoilt = tensors[3].clone()
            spoilt[place] = bad
            finite, ours = run(with_isa(isa, 2), [*tensors[:3], spoilt], apart=True)
            assert finite is False and not ours[0][place].isfinite()
            others = torch.arange(n) != place
            assert same([t[others] for t in ours], [t[others] for t in clean])


def test_flushing_of_denormals_in_the_caller_changes_nothing(isas):
    tensors, how = [1e-39 * t for t in make(200003)], replace(HOW, eps=1e-30, lr=1e-20)
    adam, buffers = CpuAdam(2), [torch.empty(200003) for _ in range(3)]
    expected, square = run(adam, tensors, how)[1], adam.square(tensors[0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        adam.step(*tensors, how, into=tuple(buffers))
        flushed = adam.square(tensors[0])
    finally:
        torch.set_flush_denormal(False)
    assert flushed == square > 0 and same(buffers, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_stretches_are_what_they_would_be_alone(dtype):
    tensors = make(200003, dtype, dtype)
    alone = [t.clone() for t in tensors]
    hows = [replace(HOW, weight_decay=0.0), replace(HOW, lr=1e-2), replace(HOW, step=7)]
    stretches = list(zip((0, 100, 140000), (100, 139990, 200003), hows, strict=True))  # some lie in none
    assert CpuAdam(2).steps(tensors[:3], tensors[3], stretches)
    for start, stop, how in stretches:
        CpuAdam(1).step(*(t[start:stop] for t in alone), how)
    assert all(torch.equal(one, other) for one, other in zip(tensors, alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_second_call_that_keeps_to_some_ranges_completes_the_first(dtype):
    """With another gradient there, from the old state: thousands of rows, one of them longer than a thread's share."""
    p, m, v, grad = make(200003, dtype, dtype)
    hows = [replace(HOW, weight_decay=0.0), replace(HOW, lr=1e-2)]
    stretches = list(zip((0, 100001), (100001, 200003), hows, strict=True))
    rows = torch.randint(0, 28000, (3000,), generator=torch.Generator().manual_seed(0))
    only = ranges_of_rows(torch.cat([rows, torch.arange(5000, 16000)]).numpy(), 28571, 7)
    guess = grad.clone()
    for start, stop in only.tolist():
        guess[start:stop] = float("nan")
    (*into, low), (*whole, wide) = ([torch.empty_like(p) for _ in range(4)] for _ in range(2))
    assert CpuAdam(2).steps((p, m, v), grad, stretches, into=tuple(whole), low=wide)
    assert not CpuAdam(2).steps((p, m, v), guess, stretches, into=tuple(into), low=low)
    assert CpuAdam(13).order((p, m, v), grad, stretches, into=tuple(into), low=low, only=only)()[0]
    assert all(torch.equal(one, other) for one, other in zip((*into, low), (*whole, wide), strict=True))


def test_low_may_take_the_gradients_place():
    p, m, v, grad = tensors = make(1001, torch.bfloat16)
    _, expected = run(CpuAdam(1), tensors, low=torch.bfloat16)
    CpuAdam(1).step(p, m, v, grad, HOW, low=grad)
    assert same([p, m, v, grad], expected)


@pytest.mark.parametrize(
    ("low", "apart"), [(None, False), (torch.bfloat16, True), (torch.float16, False), (torch.float32, True)]
)
def test_without_a_compiler_torch_does_the_same_after_one_warning(library, low, apart, request):
    tensors, how = make(5003, torch.bfloat16), replace(HOW, step=3, divisor=3.7)
    _, expected = run(CpuAdam(1), tensors, how, apart=apart, low=low)
    square = CpuAdam(1).square(tensors[3])
    request.getfixturevalue("no_compiler")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adam = CpuAdam(1)
        assert not CpuAdam(1).native and adam.isa == "torch"
    assert [str(w.message).endswith("no room for the dragon") for w in caught] == [True]
    ours = run(adam, tensors, how, apart=apart, low=low)[1]
    assert same(ours, expected)
    assert adam.square(tensors[3]) == pytest.approx(square, rel=1e-13)
    tensors[3][5002] = float("inf")
    assert run(adam, tensors, how)[0] is False


def test_fp64_state_is_updated_in_fp64():
    """Also by narrow gradients, of a unit in another dtype than the others."""
    *state, grad = make(4001, torch.float64, torch.float64)
    how = replace(HOW, step=3, divisor=3.7)
    for given in (grad, *(grad.to(narrow) for narrow in GRADS)):
        wanted, low = [t.clone() for t in state], torch.empty(4001, dtype=torch.bfloat16)
        update(wanted, given.double(), how.numbers)
        new = tuple(torch.empty(4001, dtype=torch.float64) for _ in range(3))
        assert CpuAdam(1).step(*state, given, how, into=new, low=low)
        assert all(torch.equal(ours, true) for ours, true in zip(new, wanted, strict=True))
        assert torch.equal(low, new[0].bfloat16())
    assert CpuAdam(1).square(grad) == pytest.approx(float(grad.square().sum()), rel=1e-13)


def test_a_divisor_beyond_fp32_leaves_nothing_of_the_gradient(library):
    """As a division by an fp32 number on a GPU: a norm of 1e39, clipped."""
    tensors, without = make(1000), make(1000)
    without[3].zero_()
    CpuAdam(1).step(*tensors, replace(HOW, divisor=1e39))
    CpuAdam(1).step(*without, HOW)
    assert same(tensors[:3], without[:3])


def test_ranges_that_are_none_are_refused(library):
    for only, words in (
        (np.array([[0, 4], [3, 5]]), "the ranges of only are not in ascending order"),
        (np.array([[4, 3]]), "the ranges of only are not in ascending order"),
        (np.array([[0, 11]]), "the ranges of only, 0 to 11, do not lie within 10 elements"),
        (np.array([[-1, 3]]), "the ranges of only, -1 to 3, do not lie within 10 elements"),
        (np.array([0, 5]), "only is int64 .2,., not int64 .number of ranges, 2. in one piece"),
    ):
        for call in (CpuAdam(1).steps, CpuAdam(1).order):
            with pytest.raises(ValueError, match=words):
                call(make(10)[:3], torch.zeros(10), [(0, 10, HOW)], only=only)


def test_all_problems_are_told_at_once():
    p, m, v, grad = make(10)
    how = replace(HOW, lr=float("nan"), step=0, beta1=1.5, beta2=-0.5, divisor=0.0)
    with pytest.raises(ValueError) as caught:
        CpuAdam(1).step(
            p,
            m.double(),
            torch.zeros(20)[::2],
            torch.zeros(9, dtype=torch.int32),
            how,
            into=(p.clone(), m.clone(), torch.zeros(10, device="meta")),
            low=torch.zeros(2, 5, dtype=torch.float64),
        )
    assert str(caught.value).split("; ") == [
        "m is float64, not float32 or bfloat16 or uint8",
        "v is not contiguous: its strides are (2,)",
        "into[2] is on meta, not on the CPU",
        "grad is int32, not float32 or bfloat16 or float16",
        "grad has the shape (9,), not (10,)",
        "low is float64, not bfloat16 or float16 or float32",
        "low has the shape (2, 5), not (10,)",
        "beta1 is 1.5, not in [0, 1]",
        "beta2 is -0.5, not in [0, 1]",
        "step is 0 and not at least 1",
        "lr is nan, not finite and at least 0",
        "divisor is 0.0, not at least 1e-37, as fp32 needs it",
    ]


def test_outputs_must_not_overlap_anything_else():
    p, m, v, grad = make(10)
    both = torch.zeros(15)
    with pytest.raises(ValueError, match=r"into\[0\] overlaps into\[1\] by 20 bytes; into\[1\] overlaps into\[0\]"):
        CpuAdam(1).step(p, m, v, grad, HOW, into=(both[:10], both[5:], torch.zeros(10)))
    with pytest.raises(ValueError, match=r"into\[0\] overlaps m by 40 bytes"):
        CpuAdam(1).step(p, m, v, grad, HOW, into=(m, p, v))
    with pytest.raises(ValueError, match=r"p overlaps grad by 40 bytes"):
        CpuAdam(1).step(p, m, v, p, HOW)
