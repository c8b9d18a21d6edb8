"""``gptpar evaluate``: a checkpoint's scores are those of the run that saved it, and what cannot be is told."""

import json
from pathlib import Path

import pytest

from gptpar.cli import main
from gptpar.cli.pretrain import pretrain
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from tests.unit.run.evaluation.task_files import BYTES, QUESTIONS, TEXTS, write_lines

MODEL = "--position-embedding-type rope --swiglu --untie-embeddings-and-output-weights --fp64"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], dict[str, dict]]:
    """A run folder, files of tasks, and what the run itself said of them."""
    folder = tmp_path_factory.mktemp("saved")
    files = [write_lines(folder / "questions.jsonl", QUESTIONS), write_lines(folder / "texts.jsonl", TEXTS)]
    words = [*BYTES.split(), *MODEL.split(), "--save", str(folder / "run"), "--eval-tasks", *files]
    config, derived = resolve(parse_flags(words), 1)
    pretrain(config, derived, ())
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return folder / "run", files, {line["task"]: line for line in lines if "task" in line}


def same(found: dict, said: dict[str, dict]) -> None:
    assert found["iteration"] == 4 and found["tasks"].keys() == said.keys()
    for task, scores in found["tasks"].items():
        names = scores.keys() - {"seconds"}
        assert {name: said[task][name] for name in names} == pytest.approx({n: scores[n] for n in names}, rel=1e-10)


@pytest.mark.slow
def test_scores_are_those_of_the_run(saved: tuple[Path, list[str], dict], capsys: pytest.CaptureFixture[str]) -> None:
    folder, files, said = saved
    assert main(["evaluate", "--load", str(folder), "--dtype", "fp64", "--eval-tasks", *files]) == 0
    out, err = capsys.readouterr()
    same(json.loads(out), said)
    assert " questions at iteration 4 | acc: " in err and "items in " in err
