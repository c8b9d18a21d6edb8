"""Sampling at any temperature, and flags of ``gptpar generate`` that cannot be."""

from pathlib import Path
from typing import cast

import pytest
import torch

from gptpar.cli import main
from gptpar.cli.pretrain import pretrain
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.pipeline import Stage
from gptpar.run.sampling import Sampling, continue_texts, make_texts
from tests.unit.run.evaluation.task_files import BYTES


class FixedLogits(torch.nn.Module):
    """Always the same logits, with padding rows that must never be chosen."""

    def __init__(self, logits: list[float]):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.tensor([*logits, 1e9]))

    def forward(self, window: torch.Tensor, fields: dict[str, int]) -> torch.Tensor:
        return self.logits.expand(window.shape[1], -1)


def sampled(logits: list[float], temperature: float, top_k: int = 0) -> list[int]:
    stage = cast(Stage, FixedLogits(logits))
    how = Sampling(40, context=4, vocab_size=len(logits), temperature=temperature, top_k=top_k)
    (text,) = texts = make_texts([[0]], how)
    for _ in continue_texts(stage, texts, how):
        pass
    return text.made


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-37])
@pytest.mark.parametrize("top_k", [0, 2])
def test_ever_lower_temperatures_take_the_likeliest_token(temperature: float, top_k: int) -> None:
    assert sampled([30.0, 80.0, -5.0], temperature, top_k) == [1] * 40


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--seed", "1e23"], "argument --seed: 1e23 is not a whole number from 0 to 2^64 - 1"),
        (["--temperature", "nan"], "argument --temperature: nan is not a number of 0 or more"),
        (["--top-p", "0"], "argument --top-p: 0 is not above 0 and at most 1"),
        (["--stop", ""], "argument --stop: is empty: give a text"),
        (["--tokenizer-model", " "], "argument --tokenizer-model: is empty, perhaps by an unset shell variable"),
    ],
)
def test_flags_that_cannot_be_are_told(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["generate", "--load", str(tmp_path), *flags])
    assert stopped.value.code == 2 and told in capsys.readouterr().err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saved a model of bytes."""
    folder: Path = tmp_path_factory.mktemp("run")
    config, derived = resolve(parse_flags([*BYTES.split(), "--save", str(folder)]), 1)
    pretrain(config, derived, ())
    return folder


def printed(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    capsys.readouterr()
    assert main(["generate", "--load", str(folder), "--num-tokens", "12", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_several_prompts_give_what_each_gives_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = [printed(folder, capsys, "--prompt", prompt) for prompt in ("one", "and two")]
    wanted = f"--- 1 of 2\n{alone[0]}--- 2 of 2\n{alone[1]}"
    assert printed(folder, capsys, "--prompt", "one", "--prompt", "and two") == wanted
    (tmp_path / "prompts.txt").write_text("one\nand two\n")
    assert printed(folder, capsys, "--prompts", str(tmp_path / "prompts.txt")) == wanted
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfone\r\nand two")
    assert printed(folder, capsys, "--prompts", str(tmp_path / "windows.txt")) == wanted
    assert alone[0].startswith("one") and len(alone[0]) > 5


@pytest.mark.slow
def test_a_stream_is_the_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = printed(folder, capsys, "--prompt", "one")
    assert printed(folder, capsys, "--prompt", "one", "--stream") == whole
    stop = whole[6]
    assert printed(folder, capsys, "--prompt", "one", "--stop", stop) == whole[: whole.index(stop, 3)] + "\n"
