"""``gptpar inspect`` adds up parameters apart from each state of the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptpar.cli.inspect import main as inspect
from gptpar.cli.inspect import summary_of

SAVED = Path(__file__).parents[2] / "fixtures" / "checkpoints" / "bf16-zero3-cpu"


def test_tensors_are_grouped_by_what_they_are_of_the_parameters() -> None:
    summary = summary_of(SAVED / "iter_0000003", False, details=False)
    each = {"tensors": 28, "elements": 2080, "bytes": 8320}
    assert summary["groups"] == {"weights": each, "exp_avg": each, "exp_avg_sq": each}
    assert (summary["tensors"], summary["elements"], summary["bytes"]) == (84, 6240, 24960)


def test_a_list_of_checkpoints_has_a_short_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect([str(SAVED)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        " iteration         size  tensors  elements",
        "         3    24.38 KiB       84  6,240 (weights 2,080, exp_avg 2,080, exp_avg_sq 2,080)",
    ]
