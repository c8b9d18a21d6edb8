"""Rotary positions with Llama 3.1's scaling, against transformers' own frequencies and against the formula's ends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from gptpar.model.block import Block
from gptpar.model.rotary import frequencies_of, rotate
from tests.helpers import TINY, tiny_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(("factor", "base", "width"), [(8.0, 500_000, 128), (32.0, 500_000, 64), (8.0, 10_000, 16)])
def test_frequencies_are_those_of_transformers(factor: float, base: int, width: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    numbers = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        hidden_size=4 * width,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "llama3", "factor": factor, "rope_theta": float(base), **numbers},
    )
    wanted, attention = ROPE_INIT_FUNCTIONS["llama3"](config, CPU)
    assert attention == 1.0
    torch.testing.assert_close(frequencies_of(width, base, factor, CPU), wanted, rtol=1e-6, atol=0)


def test_frequencies_are_kept_divided_or_between_by_their_turns_in_8192_tokens() -> None:
    plain, scaled = frequencies_of(128, 500_000, 1, CPU), frequencies_of(128, 500_000, 8, CPU)
    turns = plain * 8192 / (2 * math.pi)
    assert torch.equal(scaled[turns >= 4], plain[turns >= 4]) and (turns >= 4).sum() > 20
    assert torch.equal(scaled[turns <= 1], plain[turns <= 1] / 8) and (turns <= 1).sum() > 20
    between = (turns > 1) & (turns < 4)
    assert between.any() and ((scaled < plain) & (scaled > plain / 8))[between].all()


def float64_turned(x: np.ndarray, positions: np.ndarray, rotated: int, base: int, factor: float) -> np.ndarray:
    """Rotary positions as complex numbers, all in float64."""
    frequencies = float(base) ** -(np.arange(0, rotated, 2) / rotated)
    kept = np.clip((frequencies * 8192 / (2 * np.pi) - 1) / 3, 0, 1)
    frequencies = frequencies * kept + frequencies / factor * (1 - kept)
    pairs = x[..., : rotated // 2] + 1j * x[..., rotated // 2 : rotated]
    turned = pairs * np.exp(1j * (positions[:, None, :, None] * frequencies))
    return np.concatenate((turned.real, turned.imag, x[..., rotated:]), axis=-1)


@pytest.mark.parametrize("rotated", [16, 4])
@pytest.mark.parametrize("factor", [1.0, 8.0, 32.0])
@pytest.mark.parametrize(("base", "spacing"), [(10_000, 1), (500_000, 3)])
def test_fp64_turns_by_fp64_angles(rotated: int, factor: float, base: int, spacing: int) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (2, 3, 32, 16))
    positions = np.stack((np.arange(32) * spacing, np.arange(32)))
    wanted = float64_turned(x, positions, rotated, base, factor)
    given = torch.from_numpy(x)
    found = rotate(given, torch.from_numpy(positions), rotated, base, factor).numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-14)
    plain = rotate(given[1:], None, rotated, base, factor).numpy()
    np.testing.assert_allclose(plain, wanted[1:], rtol=0, atol=1e-14)


@pytest.mark.parametrize("scaling", ["", "--use-rope-scaling --rope-scaling-factor 32"])
def test_attention_in_fp64_is_that_of_float64(scaling: str) -> None:
    flags = f"--position-embedding-type rope --rotary-base 500000 --disable-bias-linear {scaling}"
    attention = Block(tiny_config(flags).model).attention.double()
    random = np.random.default_rng(0)
    for parameter in attention.parameters():
        parameter.data = torch.from_numpy(random.uniform(-0.2, 0.2, parameter.shape))
    x, positions = random.uniform(-1, 1, (16, 32)), np.arange(16)[None] * 100
    heads = (x @ attention.qkv.weight.detach().numpy().T).reshape(1, 16, 4, 3, 8).transpose(3, 0, 2, 1, 4)
    q, k = (float64_turned(part, positions, 8, 500_000, 32.0 if scaling else 1.0) for part in heads[:2])
    scores = q @ k.swapaxes(-1, -2) / 8**0.5 + np.triu(np.full((16, 16), -np.inf), 1)
    shares = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = (shares @ heads[2])[0].transpose(1, 0, 2).reshape(16, 32) @ attention.out.weight.detach().numpy().T
    found = attention(torch.from_numpy(x), torch.from_numpy(positions), None, 16).detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_formats_turn_by_fp32_angles(dtype: torch.dtype) -> None:
    x = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    angles = torch.tensor([0, 5000, 100_000])[:, None].float() * frequencies_of(16, 500_000, 8, CPU)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    assert torch.equal(rotate(x, torch.tensor([[0, 5000, 100_000]]), 16, 500_000, 8), wanted)


def test_the_flags_are_megatrons() -> None:
    rope = [*TINY.split(), "--position-embedding-type", "rope"]
    model = resolve(parse_flags([*rope, "--use-rope-scaling"]), 1)[0].model
    assert (model.use_rope_scaling, model.rope_scaling_factor) == (True, 8.0)
    with pytest.raises(ConfigError) as caught:
        resolve(parse_flags([*TINY.split(), "--use-rope-scaling"]), 1)
    assert caught.value.problems == [
        "--use-rope-scaling changes rotary positions: give --position-embedding-type rope, or drop it."
    ]
