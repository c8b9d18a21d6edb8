"""``gptpar generate`` and ``gptpar evaluate``: any temperature, flags that cannot be, texts and scores of one run."""

import json
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch

from gptpar.cli import main
from gptpar.cli.pretrain import pretrain
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.pipeline import Stage
from gptpar.run.sampling import Sampling, continue_texts, make_texts
from tests.unit.run.evaluation.task_files import BYTES, QUESTIONS, TEXTS, write_lines


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


class SavedRun(NamedTuple):
    """A run that saved a model of bytes, and scored it on tasks: its own scores by task."""

    folder: Path
    tasks: list[str]
    scores: dict[str, dict]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    folder = tmp_path_factory.mktemp("saved")
    tasks = [write_lines(folder / "questions.jsonl", QUESTIONS), write_lines(folder / "texts.jsonl", TEXTS)]
    model = "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --fp64"
    words = [*BYTES.split(), *model.split(), "--save", str(folder / "run"), "--eval-tasks", *tasks]
    config, derived = resolve(parse_flags(words), 1)
    pretrain(config, derived, ())
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return SavedRun(folder / "run", tasks, {line["task"]: line for line in lines if "task" in line})


@pytest.mark.slow
def test_evaluated_scores_are_those_of_the_run(run: SavedRun, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--load", str(run.folder), "--dtype", "fp64", "--eval-tasks", *run.tasks]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["iteration"] == 4 and found["tasks"].keys() == run.scores.keys()
    for task, scores in found["tasks"].items():
        del scores["seconds"]
        assert {name: run.scores[task][name] for name in scores} == pytest.approx(scores, rel=1e-10)
    assert " questions at iteration 4 | acc: " in err and "items in " in err


@pytest.mark.slow
def test_prompts_together_and_streams_give_what_each_prompt_gives_alone(
    run: SavedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*flags: str) -> str:
        capsys.readouterr()
        assert main(["generate", "--load", str(run.folder), "--num-tokens", "12", *flags]) == 0
        return capsys.readouterr().out

    alone = [printed("--prompt", prompt) for prompt in ("one", "and two")]
    wanted = f"--- 1 of 2\n{alone[0]}--- 2 of 2\n{alone[1]}"
    assert printed("--prompt", "one", "--prompt", "and two") == wanted
    for name, text in (("prompts.txt", b"one\nand two\n"), ("windows.txt", b"\xef\xbb\xbfone\r\nand two")):
        (tmp_path / name).write_bytes(text)
        assert printed("--prompts", str(tmp_path / name)) == wanted
    assert alone[0].startswith("one") and len(alone[0]) > 5
    assert printed("--prompt", "one", "--stream") == alone[0]
    stop = alone[0][6]
    assert printed("--prompt", "one", "--stop", stop) == alone[0][: alone[0].index(stop, 3)] + "\n"
