"""Rounded moments: right on average, the same bits from every implementation, and draws that are random numbers."""

import itertools
import math

import pytest
import torch

from gptpar.config.sections.optimizer import FIRST_IN_ROOTS
from gptpar.optim.adam_arguments import AdamStep
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.rounded_states import (
    BF16,
    FP8,
    as_wide,
    draws_of,
    first_in_8_bits,
    first_of_8_bits,
    key_of,
    key_on_device,
    rounded,
    second_in_8_bits,
    second_of_8_bits,
)
from tests.unit.optim.update_cases import STEPS, cases, same

FP32 = torch.float32
CODES = torch.arange(256, dtype=FP8)
DRAWS = torch.arange(1 << 16, dtype=torch.int32)


def test_the_weights_follow_the_moments_before_rounding() -> None:
    p, m, v, g = cases()[2]
    how = AdamStep(3e-3, 0.9, 0.95, 1e-8, 0.1, 1.0, 5)
    m, v = m.to(BF16), v.to(BF16)
    exact, kept = [p.clone(), m.float(), v.float()], [p.clone(), m, v]
    CpuAdam(1).steps(exact, g, [(0, len(p), how)])
    CpuAdam(1).steps(kept, g, [(0, len(p), how)])
    assert same(kept[0], exact[0]) and not same(kept[1].float(), exact[1])


def assert_rounded_up(found: torch.Tensor, lower: float, upper: float, fraction: int) -> None:
    """By as many of all 65,536 draws as the fraction above the lower number says."""
    assert [int((found == end).sum()) for end in (lower, upper)] == [(1 << 16) - fraction, fraction]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_is_rounded_up_by_as_many_draws_as_its_fraction(sign: int) -> None:
    for exponent, fraction in itertools.product((0, 1, 127, 254), (0, 1, 0x4000, 0x8000, 0xFFFF)):
        lower = torch.tensor([exponent << 23 | 0x350000], dtype=torch.int32)
        x = sign * (lower + fraction).view(FP32).expand(1 << 16)
        ends = lower.view(FP32).item(), (lower + 0x10000).view(FP32).item()
        assert_rounded_up(rounded(x, DRAWS).float().abs(), *ends, fraction)


def test_what_is_no_number_stays_what_it_is() -> None:
    x = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0])
    for draw in (0, 1, 0xFFFF):
        found = rounded(x, torch.full((6,), draw, dtype=torch.int32))
        assert same(found, x.to(BF16))
    most = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(FP32)  # the addition would make it -0, or 0
    assert rounded(most, torch.full((2,), 0xFFFF, dtype=torch.int32)).isnan().all()


def test_draws_are_uniform_and_neither_steps_nor_halves_nor_states_repeat() -> None:
    """Mean and variance of 32,768 draws, and correlations, within five standard deviations."""
    n = 1 << 15
    m = torch.arange(n, dtype=torch.int16).view(BF16)  # all that are not negative
    found = [draws_of(m, torch.full((n,), 0.25), key_of(step)) for step in (1, 2, 3, 1_000_000)]
    of_second = draws_of(torch.full((n,), 0.5, dtype=BF16), m, key_of(1))
    halves = [half.double() / 2**16 for draws in (*found, of_second) for half in (draws & 0xFFFF, draws >> 16 & 0xFFFF)]
    for half in halves:
        assert abs(float(half.mean()) - 0.5) < 5 * (1 / 12 / n) ** 0.5
        assert abs(float(half.var()) - 1 / 12) < 5 * (1 / 180 / n) ** 0.5
        counts = torch.histc(half.float(), 64, 0, 1)
        assert float(((counts - n / 64).square() / (n / 64)).sum()) < 63 + 5 * (2 * 63) ** 0.5
        assert abs(float(torch.corrcoef(torch.stack([half[:-1], half[1:]]))[0, 1])) < 5 / n**0.5
    table = torch.corrcoef(torch.stack(halves[:8]))
    assert float((table - torch.eye(8)).abs().max()) < 5 / n**0.5


def test_the_key_on_the_device_is_that_of_the_host() -> None:
    keys = [key_of(step) for step in STEPS]
    assert [int(key_on_device(torch.tensor(float(step), dtype=torch.float64))) % 2**32 for step in STEPS] == keys
    assert len(set(keys)) == len(STEPS) and all(0 <= key < 2**32 for key in keys)


def test_in_double_precision_moments_are_rounded_by_the_same_draws(no_compiler: None) -> None:
    """Moments of fp64 are fp32 before; where the new ones are fp32 numbers, the bits are those of an fp32 run."""
    p, m, v, g = (t.clone() for t in cases()[2])
    how = AdamStep(0.0, 0.5, 0.5, 1e-8, 0.0, 1.0, 3)
    m, v, g = m.to(BF16), v.to(BF16), g.to(BF16).float()  # sums and products of 8 bits are exact
    narrow, wide = [p.clone(), m.clone(), v.clone()], [p.double(), m.clone(), v.clone()]
    with pytest.warns(UserWarning, match="no room for the dragon"):
        adam = CpuAdam(1)
    adam.steps(narrow, g, [(0, len(p), how)])
    adam.steps(wide, g.double(), [(0, len(p), how)])
    assert all(one.dtype == BF16 for one in wide[1:])
    share = [float((a == b).float().mean()) for a, b in zip(narrow[1:], wide[1:], strict=True)]
    assert min(share) > 0.999


@pytest.mark.parametrize("draw", [0, 0x8000, 0xFFFF])
def test_no_draw_changes_what_8_bits_hold(draw: int) -> None:
    """Each code of v, each of m beside it, and bfloat16 holds them, too."""
    draws = torch.full((256,), draw, dtype=torch.int32)
    numbers = second_of_8_bits(CODES)
    assert bool((numbers.diff() > 0).all()) and (float(numbers[0]), float(numbers[-1])) == (0.0, 224.0)
    assert torch.equal(second_in_8_bits(numbers, draws), CODES) and torch.equal(numbers.to(BF16).float(), numbers)
    for v in numbers[1:]:
        m = first_of_8_bits(CODES, v.expand(256))
        assert torch.equal(first_in_8_bits(m, v.expand(256), draws), CODES) and torch.equal(m.to(BF16).float(), m)
        assert 7.7 * float(v) ** 0.5 <= float(m.max()) <= 15.5 * float(v) ** 0.5


@pytest.mark.parametrize("code", [1, 2, 100, 254])
def test_8_bits_of_v_are_rounded_up_by_as_many_draws_as_the_fraction(code: int) -> None:
    ends = second_of_8_bits(torch.tensor([code, code + 1], dtype=FP8))
    for fraction in (0, 1, 0x4000, 0xFFFF):
        x = (ends[:1].view(torch.int32) + (fraction << 5)).view(FP32).expand(1 << 16)
        assert_rounded_up(second_in_8_bits(x, DRAWS), code, code + 1, fraction)


@pytest.mark.parametrize(("code", "v"), [(0, 1.0), (15, 3.0), (16, 4.0), (77, 1e-9), (126, 2.0**-40)])
def test_8_bits_of_m_are_rounded_up_by_as_many_draws_as_the_fraction(code: int, v: float) -> None:
    ones = torch.full((1 << 16,), v)
    scale = 2.0 ** math.floor(math.log2(v) / 2)
    for sign, fraction in itertools.product((0, 128), (1, 0x4000, 0xFFFF)):
        offset = torch.tensor([(16 * 123 + code << 19) + (fraction << 3)], dtype=torch.int32).view(FP32)
        m = ((offset - 1 / 16) * scale * (-1 if sign else 1)).expand(1 << 16)
        assert_rounded_up(first_in_8_bits(m, ones, DRAWS), code | sign, code + 1 | sign, fraction)


def test_8_bits_have_ends_and_neither_a_zero_v_nor_a_nan_a_sign() -> None:
    draws = torch.zeros(6, dtype=torch.int32)
    x = torch.tensor([0.0, 2.0**-149, 2.0**-57, 225.0, math.inf, math.nan])
    assert second_in_8_bits(x, draws).tolist() == second_in_8_bits(-x, draws).tolist() == [0, 1, 1, 255, 255, 255]
    m = torch.tensor([2.0**-149, 0.2, 15.5, 1e9, math.inf, math.nan])
    assert first_in_8_bits(m, torch.ones(6), draws).tolist() == [0, 32, 127, 127, 127, 127]
    assert first_in_8_bits(-m, torch.ones(6), draws).tolist() == [128, 160, 255, 255, 255, 127]
    assert first_in_8_bits(m, torch.zeros(6), draws).tolist() == [0] * 6


def test_moments_in_8_bits_are_right_on_average_and_change_weights_as_those_in_fp32_do() -> None:
    """Gradients from 1e-7 to 1 over 300 steps; changes beside fp32's: their mean, and the error's size."""
    generator = torch.Generator().manual_seed(3)
    scales, p = (torch.randn(4_000, generator=generator) for _ in range(2))
    scales = 10.0 ** -(7 * torch.rand(4_000, generator=generator))
    exact = [p.clone(), torch.zeros(4_000), torch.zeros(4_000)]
    eight = [p.clone(), *(torch.zeros(4_000, dtype=FP8) for _ in range(2))]
    for step in range(1, 301):
        g = scales * (torch.randn(4_000, generator=generator) + 0.3)
        before = [state[0].clone() for state in (exact, eight)]
        for state in (exact, eight):
            CpuAdam(1).step(*state, g, AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, step))
    wanted, found = (state[0] - old for state, old in zip((exact, eight), before, strict=True))
    assert float((found - wanted).norm() / wanted.norm()) < 0.15
    assert float(found @ wanted / (wanted @ wanted)) == pytest.approx(1, abs=0.04)
    assert float(found.abs().max()) < 1.5 * float(wanted.abs().max())
    m, v = as_wide(eight[1:], FP32)
    assert float((v / exact[2]).mean()) == pytest.approx(1, abs=0.02)
    assert float(((m - exact[1]) / exact[2].sqrt()).mean()) == pytest.approx(0, abs=0.002)


def test_elements_with_equal_moments_in_8_bits_have_draws_of_their_own() -> None:
    n = 10_000
    p, g = torch.randn(n, generator=torch.Generator().manual_seed(5)), torch.full((n,), 0.011)
    m, v = (torch.zeros(n, dtype=FP8) for _ in range(2))
    CpuAdam(1).step(p, m, v, g, AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, 1))
    wanted = (0.1 * 0.011, 0.001 * 0.011**2)
    for found, true in zip(as_wide([m, v], FP32), wanted, strict=True):
        assert len(found.unique()) == 2 and float(found.mean()) == pytest.approx(true, rel=5e-3)


def test_the_largest_first_moment_of_the_usual_betas_is_kept() -> None:
    """Gradients that make it as large as it can be, beside the root of the second one which is 1 to 2."""
    beta1, beta2 = 0.9, 0.999
    gradients = (beta1 / beta2) ** torch.arange(999, -1, -1, dtype=torch.float64)
    m = v = torch.zeros((), dtype=torch.float64)
    for g in gradients:
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    size = torch.linspace(1, 2, 999, dtype=torch.float64)[:-1]
    first, second = (size * m / v.sqrt()).float(), size.square().float()
    assert 7.2 < float(m / v.sqrt()) < FIRST_IN_ROOTS
    draw = torch.full((len(size),), 0x8000, dtype=torch.int32)
    found = first_of_8_bits(first_in_8_bits(first, second, draw), second)
    assert ((found - first).abs() <= first / 32).all()
    assert first_of_8_bits(torch.tensor([127], dtype=FP8), torch.ones(1)).item() == 2 * FIRST_IN_ROOTS
