"""Norms of gradients of any length."""

import pytest
import torch

from gptpar.optim.grad_norm import square_of

CPU = torch.device("cpu")


def test_a_norm_of_any_length_is_exact() -> None:
    """Those of 16 bits are not rounded to 16 bits."""
    grad = torch.linspace(-1, 1, 1000)
    for dtype in (torch.float32, torch.bfloat16):
        pieces = [piece.to(dtype) for piece in (grad[:1], grad[1:130], grad[130:130], grad[130:])]
        exact = float(torch.cat(pieces).double().square().sum())
        assert square_of(pieces, CPU).item() == pytest.approx(exact, rel=1e-6)
    assert square_of([], CPU).item() == 0


def test_a_norm_of_a_long_vector_is_exact() -> None:
    """Summed in one go, fp32 is 3 % off here."""
    square = square_of([torch.full((50_000_000,), 0.1)], CPU)
    assert square.dtype == torch.float64
    assert square.sqrt().item() == pytest.approx(0.1 * 50e6**0.5, rel=1e-6)
