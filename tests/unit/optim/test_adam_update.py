"""One update, the same bits from every implementation: all bit patterns, edges, and the numbers of a step."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch

from gptpar.optim.adam_arguments import AdamStep
from gptpar.optim.adam_update import AdamHyperparameters, numbers, step_numbers
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.elementwise import clipped_divisor, power
from gptpar.optim.rounded_states import BF16, FP8
from tests.pairs import every_pair
from tests.unit.optim.cpu_adam_runs import with_isa
from tests.unit.optim.update_cases import FORMATS, HOW, STEPS, cases, kept, numbers_on_device, same, update

FP32 = torch.float32


def steps_to_take() -> list[AdamStep]:
    """Without clipping and with it, with a large loss scale, and a norm beyond fp32."""
    divisors = [1.0, clipped_divisor(2.7, 1.0, 0.3), clipped_divisor(0.1, 3000.0, 0.3), 1e39]
    return [AdamStep(*HOW, step, divisor) for step, divisor in zip((1, 2, 1000, 999_999), divisors, strict=True)]


@every_pair(isa=[0, 1, 2], formats=list(product((FP32, BF16, FP8), repeat=2)), grad=FORMATS, low=FORMATS)
def test_every_instruction_set_computes_the_definition(
    isas: list[int], isa: int, formats: tuple[torch.dtype, torch.dtype], grad: torch.dtype, low: torch.dtype
) -> None:
    """All bit patterns, edges and the usual; in place and beside, at every alignment of a vector's end."""
    if isa not in isas:
        pytest.skip("not this processor's")
    for p, m, v, values in cases():
        old, given = [p, *kept(m, v, formats)], values.to(grad)
        for number, how in enumerate(steps_to_take()):
            wanted, wanted_low = [t.clone() for t in old], torch.empty(len(p), dtype=low)
            update(wanted, given, how.numbers, low=wanted_low, key=how.key)
            ours, narrow = [t.clone() for t in old], torch.empty_like(wanted_low)
            into = [torch.empty_like(t) for t in old] if number % 2 else None
            with_isa(isa, 2).steps(ours, given, [(0, len(p), how)], into=into, low=narrow)
            found, expected = [*(into or ours), narrow], [*wanted, wanted_low]
            for name, one, true in zip(("p", "m", "v", "low"), found, expected, strict=True):
                assert same(one, true), (name, how)


def test_moments_may_be_taken_as_they_are() -> None:
    """Without bias correction the first step is lr * 0.1 g / (sqrt(0.05 g^2) + eps), on every path the same."""
    how = HOW._replace(bias_correction=0.0, weight_decay=0.0)
    n = step_numbers(how, 1, 1.0)
    assert (n.floor, n.size) == (how.eps, how.lr) and step_numbers(how, 7, 1.0) == n
    p, m, v, g = (torch.tensor([value]) for value in (1.0, 0.0, 0.0, 0.5))
    assert CpuAdam(1).step(p, m, v, g, AdamStep(*how, 1))
    wanted = 1 - how.lr * 0.05 / (math.sqrt(0.05 * 0.25) + how.eps)
    assert p.item() == pytest.approx(wanted, rel=1e-6)
    by_torch = numbers(AdamHyperparameters(*(torch.tensor(x, dtype=torch.float64) for x in how)), torch.tensor(3.0))
    assert [number.item() for number in by_torch] == pytest.approx(list(n.own), rel=1e-15)


def test_each_operation_is_rounded_by_itself() -> None:
    """In fp64 with values whose products round: hand-computed with exact fractions, rounded after every operation."""
    p, m, v, g = 1.1, 0.7, 0.3, 1.9
    n = step_numbers(HOW, 3, 3.7)

    def rounded(value: Fraction) -> Fraction:
        return Fraction(float(value))

    x = rounded(Fraction(g) * Fraction(n.scale))
    new_m = rounded(Fraction(m) + rounded(Fraction(n.rest1) * rounded(x - Fraction(m))))
    new_v = rounded(rounded(Fraction(n.beta2) * Fraction(v)) + rounded(rounded(Fraction(n.rest2) * x) * x))
    quotient = rounded(new_m / rounded(Fraction(math.sqrt(new_v)) + Fraction(n.floor)))
    new_p = rounded(rounded(Fraction(n.decay) * Fraction(p)) - rounded(Fraction(n.size) * quotient))
    state = [torch.tensor([value], dtype=torch.float64) for value in (p, m, v)]
    update(state, torch.tensor([g], dtype=torch.float64), n)
    assert [t.item() for t in state] == [float(new_p), float(new_m), float(new_v)]


# x / 0.3 and x * (1 / 0.3) are the same bits for nearly every x; x / 0.7 and x * (1 / 0.7) for every second one.
@pytest.mark.parametrize(
    ("norm", "loss_scale", "max_norm"),
    [(2.7, 1.0, 0.3), (0.1, 3000.0, 0.3), (5.0, 3000.0, 0.0), (0.77, 1.0, 0.7), (0.7, 3000.0, 0.7)],
)
def test_numbers_on_the_device_are_those_of_the_host(norm: float, loss_scale: float, max_norm: float) -> None:
    for step in STEPS:
        steps, on_device = (torch.tensor(number, dtype=torch.float64) for number in (float(step), norm))
        found = numbers_on_device(steps, on_device, loss_scale, max_norm)
        assert found == list(step_numbers(HOW, step, clipped_divisor(norm, loss_scale, max_norm))), step


def test_a_power_is_within_its_roundings() -> None:
    """Of 1.5 log2 t products each rounds by half a unit in the last place, which squaring doubles."""
    for base in (0.9, 0.95, 0.999, 0.9999):
        for step in STEPS:
            assert power(base, step) == pytest.approx(base**step, rel=step * 1e-15, abs=1e-300)
        assert power(base, 1000) == pytest.approx(float(Fraction(base) ** 1000), rel=1e-12)
    assert power(0.9, 0) == 1.0 and power(0.9, 1) == 0.9 and power(0.9, 2) == 0.9 * 0.9
