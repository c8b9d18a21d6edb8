"""Numbers as sums of narrower ones, compiled and not."""

import pytest
import torch

from gptpar.model.dtypes import in_parts


@pytest.mark.parametrize("compiled", [False, True])
def test_three_numbers_in_bf16_are_one_in_fp32(compiled: bool) -> None:
    torch.manual_seed(3)
    numbers = torch.cat([torch.randn(1000) * 10.0**power for power in (-30, -3, 0, 20)] + [torch.zeros(1)])
    parts = (torch.compile(in_parts) if compiled else in_parts)(numbers, torch.bfloat16, 3)
    assert all(part.dtype == torch.bfloat16 for part in parts)
    assert torch.equal(sum(part.double() for part in parts), numbers.double())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 2.0**-17), (torch.float16, 2.0**-22)])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_two_numbers_have_twice_the_bits(dtype: torch.dtype, most: float, wide: torch.dtype, compiled: bool) -> None:
    numbers = torch.linspace(1, 3, 999, dtype=wide)
    first, second = (torch.compile(in_parts) if compiled else in_parts)(numbers, dtype, 2)
    assert torch.equal(first, numbers.float().to(dtype))
    assert ((first.double() + second.double()) / numbers - 1).abs().max() <= most


def test_wide_numbers_are_their_own_first_part() -> None:
    numbers = torch.randn(9, dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):
        first, second = in_parts(numbers, dtype, 2)
        assert torch.equal(first, numbers.to(dtype)) and not second.any()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_first_part_has_the_gradient(dtype: torch.dtype, compiled: bool) -> None:
    def weighted(x: torch.Tensor) -> torch.Tensor:
        first, second = in_parts(x, dtype, 2)
        return (first * torch.tensor([2.0, 3.0], dtype=dtype)).sum() + 5 * second.sum()

    numbers = torch.tensor([1 / 3, -7.1], requires_grad=True)
    loss = (torch.compile(weighted) if compiled else weighted)(numbers)
    (grad,) = torch.autograd.grad(loss, numbers)
    assert grad.tolist() == [2.0, 3.0]
    first, second = in_parts(numbers.detach(), dtype, 2)
    assert all(torch.equal(got, one) for got, one in zip(in_parts(numbers, dtype, 2), (first, second), strict=True))
