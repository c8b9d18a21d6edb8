"""Numbers out of a metrics.jsonl that somebody else may have written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptpar.cli import main
from gptpar.errors import GptparError
from gptpar.reporting.series import series

FILE = Path("run/metrics.jsonl")


def test_what_is_not_finite_or_absent_is_none() -> None:
    lines = [{"iteration": 1, "a": value} for value in (1, 2.5, None, float("nan"), float("inf"))]
    assert series(FILE, [*lines, {"iteration": 6}], "a") == [1.0, 2.5, None, None, None, None]


@pytest.mark.parametrize("value", ["1.5", True, 10**400])
def test_what_is_no_number_is_told(value: object) -> None:
    with pytest.raises(GptparError) as caught:
        series(FILE, [{"iteration": 1, "lm_loss": 2.0}, {"iteration": 7, "lm_loss": value}], "lm_loss")
    assert str(caught.value) == (
        f"run/metrics.jsonl: lm_loss of iteration 7 is {repr(value)[:60]}, not a number: repair or delete the line"
    )


@pytest.mark.parametrize(("verb", "text"), [("summary", '"high"'), ("plot", "1" + "0" * 400)])
def test_no_verb_ends_in_a_traceback(verb: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = json.dumps({"consumed_tokens": 1, "learning_rate": 1, "grad_norm": 1, "tokens_per_s": 1})[1:]
    (tmp_path / "metrics.jsonl").write_text(f'{{"iteration": 3, "lm_loss": {text}, {rest}\n')
    assert main([verb, str(tmp_path)]) == 1
    assert "metrics.jsonl: lm_loss of iteration 3 is" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([verb, ""])
    assert "is empty, perhaps by an unset shell variable" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "drawn"),
    [("-1e308", True), ("1e308", False), ("1e-320", False), ("Infinity", False)],
)
def test_any_number_can_be_summed_up_and_drawn(number: str, drawn: bool, tmp_path: Path) -> None:
    keys = ("lm_loss", "consumed_tokens", "learning_rate", "grad_norm", "tokens_per_s")
    lines = [[f'"iteration": {i}', *(f'"{key}": {value}' for key in keys)] for i, value in ((1, 2), (2, number))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{{{', '.join(line)}}}\n" for line in lines))
    assert main(["summary", str(tmp_path)]) == 0
    if drawn:
        assert main(["plot", str(tmp_path)]) == 0
