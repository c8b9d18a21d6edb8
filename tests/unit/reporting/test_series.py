"""Numbers out of a metrics.jsonl that somebody else may have written."""

import json
from pathlib import Path

import pytest

from gptpar.cli import main


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
    ("number", "drawn"), [("-1e308", True), ("1e308", False), ("1e-320", False), ("Infinity", False)]
)
def test_any_number_can_be_summed_up_and_drawn(number: str, drawn: bool, tmp_path: Path) -> None:
    keys = ("lm_loss", "consumed_tokens", "learning_rate", "grad_norm", "tokens_per_s")
    lines = [[f'"iteration": {i}', *(f'"{key}": {value}' for key in keys)] for i, value in ((1, 2), (2, number))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{{{', '.join(line)}}}\n" for line in lines))
    assert main(["summary", str(tmp_path)]) == 0
    if drawn:
        assert main(["plot", str(tmp_path)]) == 0
