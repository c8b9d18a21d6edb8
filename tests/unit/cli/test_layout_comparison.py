"""The verdict of check-layouts."""

import pytest
import torch

from gptpar.cli import check_layouts
from gptpar.cli.check_layouts.compare import Comparison, round_off
from gptpar.cli.check_layouts.outcome import Outcome, Tensors


def outcome(bias: float, weight: float = 1.0) -> Outcome:
    tensors: Tensors = {
        "key.bias": torch.tensor([1.0, bias], dtype=torch.float64),
        "weight": torch.full((2,), weight, dtype=torch.float64),
    }
    return Outcome(dict(tensors), [(1.0, 1.0)], [tensors], [dict(tensors)])


@pytest.mark.parametrize(("bias", "told"), [(1e-17, True), (1e-3, False), (0.0, False)])
def test_a_difference_names_gradients_that_are_round_off_alone(
    bias: float, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert round_off(outcome(bias).gradients[0]) == ["key.bias"] * told
    comparison = Comparison("fp64", 1, "one process", speaks=True)
    comparison.compare("a layout", outcome(bias), outcome(bias))
    comparison.sum_up()
    assert "round-off" not in capsys.readouterr().out
    comparison.compare("another", outcome(bias, weight=1.1), outcome(bias))
    comparison.sum_up()
    text = capsys.readouterr().out
    assert (
        "1 of 2 combinations differ" in text
        and ("such as key.bias, has elements that are zero by construction" in text) == told
    )


def test_the_verdict_names_a_resume_only_if_there_was_one(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = Comparison("fp64", 1, "one process", speaks=True)
    once = outcome(0.0)
    alone = Outcome(once.initial, once.steps * 2, once.gradients * 2, once.weights * 2)
    comparison.compare("a layout", once, alone)
    comparison.sum_up()
    verdict = "the combination computes the same as one process: largest relative difference 0.0e+00 over 1 steps"
    assert capsys.readouterr().out.splitlines()[-1] == f"{verdict} (tolerance 1e-10)"
    comparison.compare("another", alone, alone)
    comparison.sum_up()
    verdict = "all 2 combinations compute the same as one process: largest relative difference 0.0e+00 over 1 steps"
    resume = ", a save and a resume in another layout"
    assert capsys.readouterr().out.splitlines()[-1] == f"{verdict}{resume} (tolerance 1e-10)"


def test_workers_get_the_words_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, list[str]]] = []
    monkeypatch.setattr(check_layouts, "start_workers", lambda count, argv: started.append((count, argv)) or 0)
    words = ["--nproc-per-node", "2", "--only", "CPU optimizer 0.6"]
    assert check_layouts.main(words) == 0
    assert started == [(2, ["check-layouts", *words])]
