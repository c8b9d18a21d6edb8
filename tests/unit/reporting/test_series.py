"""Numbers out of a metrics.jsonl that somebody else may have written."""

import json
from pathlib import Path

import pytest

from gptpar.cli import main
from gptpar.reporting.curves import load_run
from gptpar.reporting.figures.runs import draw_runs
from gptpar.reporting.records import ValidationRecord
from gptpar.reporting.sinks import JsonlSink
from tests.unit.reporting.records import record


@pytest.mark.parametrize(("verb", "text"), [("summary", '"high"'), ("plot", "1" + "0" * 400)])
def test_no_verb_ends_in_a_traceback(verb: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = json.dumps({"consumed_tokens": 1, "learning_rate": 1, "grad_norm": 1, "tokens_per_s": 1})[1:]
    (tmp_path / "metrics.jsonl").write_text(f'{{"iteration": 3, "lm_loss": {text}, {rest}\n')
    assert main([verb, str(tmp_path)]) == 1
    assert "metrics.jsonl: lm_loss of iteration 3 is" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["-1e308", "1e308", "1e-320", "Infinity"])
def test_any_number_can_be_summed_up(number: str, tmp_path: Path) -> None:
    keys = ("lm_loss", "consumed_tokens", "learning_rate", "grad_norm", "tokens_per_s")
    lines = [[f'"iteration": {i}', *(f'"{key}": {value}' for key in keys)] for i, value in ((1, 2), (2, number))]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{{{', '.join(line)}}}\n" for line in lines))
    assert main(["summary", str(tmp_path)]) == 0


@pytest.mark.slow
def test_picture_of_one_run_with_reference_and_then_with_absurd_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = JsonlSink(tmp_path)
    for i in range(1, 31):
        sink.iteration(record(i))
    assert main(["plot", str(tmp_path), "--reference-loss", "3.5", "--reference-label", "unigram entropy"]) == 0
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'run.png'}\n"
    sink.validation(ValidationRecord(30, 240, 30720, 3.1))
    figure = draw_runs([load_run(tmp_path, "a")], 3.5, "unigram entropy")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["unigram entropy 3.500", "training, smoothed", "validation"]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["Loss", "Learning rate", "Gradient norm", "Throughput"]
    keys = ("lm_loss", "consumed_tokens", "learning_rate", "grad_norm", "tokens_per_s")
    sink.iteration(record(31, **dict.fromkeys(keys, -1e308)))
    sink.close()
    assert main(["plot", str(tmp_path)]) == 0
