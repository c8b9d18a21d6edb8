"""Rotary positions with Llama 3.1's scaling, against transformers' own frequencies and against the formula's ends."""

from __future__ import annotations

import math

import pytest
import torch

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from gptpar.model.rotary import frequencies_of, rotate
from tests.helpers import TINY

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


def test_positions_turn_by_the_scaled_frequencies() -> None:
    x = torch.randn(1, 2, 3, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    positions = torch.tensor([[0, 5000, 100_000]])
    angles = positions[0, :, None].float() * frequencies_of(16, 500_000, 8, CPU)
    turned = torch.complex(*x.split(8, -1)) * torch.polar(torch.ones(()).double(), angles.double())
    found = rotate(x, positions, 16, 500_000, 8)
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), -1), rtol=0, atol=1e-6)


def test_the_flags_are_megatrons() -> None:
    rope = [*TINY.split(), "--position-embedding-type", "rope"]
    model = resolve(parse_flags([*rope, "--use-rope-scaling"]), 1)[0].model
    assert (model.use_rope_scaling, model.rope_scaling_factor) == (True, 8.0)
    with pytest.raises(ConfigError) as caught:
        resolve(parse_flags([*TINY.split(), "--use-rope-scaling"]), 1)
    assert caught.value.problems == [
        "--use-rope-scaling changes rotary positions: give --position-embedding-type rope, or drop it."
    ]
