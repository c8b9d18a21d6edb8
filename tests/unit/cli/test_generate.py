"""Sampling at any temperature, and flags of ``gptpar generate`` that cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from gptpar.cli import main
from gptpar.pipeline import Stage
from gptpar.training.generation import sample


class FixedLogits(torch.nn.Module):
    """Always the same logits, with padding rows that must never be chosen."""

    def __init__(self, logits: list[float]):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([*logits, 1e9]))

    def forward(self, window: torch.Tensor, fields: dict[str, int]) -> torch.Tensor:
        return self.logits.expand(window.shape[1], -1)


def sampled(logits: list[float], temperature: float, top_k: int = 0) -> list[int]:
    stage = cast(Stage, FixedLogits(logits))
    return list(
        sample(stage, [0], num_tokens=40, context=4, vocab_size=len(logits), temperature=temperature, top_k=top_k)
    )


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-320, 1e-40, 1e-37, 1e-30, 1e-9])
@pytest.mark.parametrize("top_k", [0, 2])
def test_ever_lower_temperatures_take_the_likeliest_token(temperature: float, top_k: int) -> None:
    assert sampled([30.0, 80.0, -5.0], temperature, top_k) == [1] * 40


@pytest.mark.parametrize("temperature", [1e30, 1e38, 1e300])
def test_ever_higher_temperatures_take_all_alike(temperature: float) -> None:
    assert set(sampled([30.0, 80.0, -5.0], temperature)) == {0, 1, 2}
    assert set(sampled([30.0, 80.0, -5.0], temperature, top_k=1)) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--seed", "1e23"], "argument --seed: 1e23 is not a whole number from 0 to 2^64 - 1"),
        (["--seed", "9" * 5000], "is not a whole number from 0 to 2^64 - 1"),
        (["--seed", str(2**64)], "argument --seed: 18446744073709551616 is not a whole number from 0 to 2^64 - 1"),
        (["--seed", "-1"], "argument --seed: -1 is not a whole number from 0 to 2^64 - 1"),
        (["--temperature", "nan"], "argument --temperature: nan is not a number of 0 or more"),
        (["--temperature", "x"], "argument --temperature: x is not a number of 0 or more"),
        (["--temperature", "1e999"], "argument --temperature: 1e999 is not a number of 0 or more"),
        (
            ["--load", ""],
            "argument --load: is empty, perhaps by an unset shell variable: set it, or leave the flag out",
        ),
        (["--tokenizer-model", " "], "argument --tokenizer-model: is empty, perhaps by an unset shell variable"),
    ],
)
def test_flags_that_cannot_be_are_told(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--load", str(tmp_path), *flags])
    assert stopped.value.code == 2 and told in capsys.readouterr().err


def test_seeds_up_to_64_bits_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--load", str(tmp_path), "--seed", str(2**64 - 1)]) == 1
    assert "there is no checkpoint in" in capsys.readouterr().err
    torch.Generator().manual_seed(2**64 - 1)
