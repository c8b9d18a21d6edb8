"""Rotary positions with Llama 3.1's scaling, against float64 and against the formula's ends."""

import numpy as np
import pytest
import torch

from gptpar.model.rotary import Rotary, rotate

CPU = torch.device("cpu")


def llama(width: int, base: int, factor: float) -> Rotary:
    """Plain positions, or with a factor those of Llama 3.1."""
    return Rotary(width, base, "llama3" if factor > 1 else None, factor, 8192, (1.0, 4.0))


def float64_turned(x: np.ndarray, positions: np.ndarray, rotated: int, base: int, factor: float) -> np.ndarray:
    """Rotary positions as complex numbers, all in float64."""
    frequencies = float(base) ** -(np.arange(0, rotated, 2) / rotated)
    kept = np.clip((frequencies * 8192 / (2 * np.pi) - 1) / 3, 0, 1)
    frequencies = frequencies * kept + frequencies / factor * (1 - kept)
    pairs = x[..., : rotated // 2] + 1j * x[..., rotated // 2 : rotated]
    turned = pairs * np.exp(1j * (positions[:, None, :, None] * frequencies))
    return np.concatenate((turned.real, turned.imag, x[..., rotated:]), axis=-1)


@pytest.mark.parametrize(
    ("rotated", "factor", "base", "spacing"), [(16, 1.0, 10_000, 1), (4, 8.0, 500_000, 3), (16, 32.0, 500_000, 3)]
)
def test_fp64_turns_by_fp64_angles(rotated: int, factor: float, base: int, spacing: int) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (2, 3, 32, 16))
    positions = np.stack((np.arange(32) * spacing, np.arange(32)))
    wanted = float64_turned(x, positions, rotated, base, factor)
    given = torch.from_numpy(x)
    found = rotate([given], torch.from_numpy(positions), llama(rotated, base, factor))[0].numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-14)
    plain = rotate([given[1:]], None, llama(rotated, base, factor))[0].numpy()
    np.testing.assert_allclose(plain, wanted[1:], rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_formats_turn_by_fp32_angles(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    angles = torch.tensor([0, 5000, 100_000])[:, None].float() * llama(16, 500_000, 8).frequencies(CPU)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    assert torch.equal(rotate([x], torch.tensor([[0, 5000, 100_000]]), llama(16, 500_000, 8))[0], wanted)
