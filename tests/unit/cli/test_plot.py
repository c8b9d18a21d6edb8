import json
import math
from pathlib import Path

import pytest

from gptpar.cli.plot import main
from gptpar.reporting.curves import load_run
from gptpar.reporting.figures.runs import draw_runs
from gptpar.system.command_line import run


def write_run(folder: Path, iterations: int, **changes) -> Path:
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for i in range(1, iterations + 1):
            values = {
                "iteration": i,
                "consumed_tokens": 1024 * i,
                "lm_loss": 3 + math.exp(-i / 20),
                "learning_rate": 1e-4,
                "grad_norm": 1.0,
                "tokens_per_s": 5000.0,
            }
            file.write(json.dumps(values | changes) + "\n")
            if i % 10 == 0:
                file.write(json.dumps({"iteration": i, "validation_loss": 3.1}) + "\n")
    return folder


@pytest.mark.slow
def test_picture_of_one_run_with_reference(tmp_path, capsys):
    folder = write_run(tmp_path / "a", 30)
    assert main([str(folder), "--reference-loss", "3.5", "--reference-label", "unigram entropy"]) == 0
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"wrote {folder / 'run.png'}\n"
    figure = draw_runs([load_run(folder, "a")], 3.5, "unigram entropy")
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["unigram entropy 3.500", "training, smoothed", "validation"]
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Loss",
        "Learning rate",
        "Gradient norm",
        "Throughput",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: name the folder of a run"),
        ('{"iteration": 1, "validation_loss": 3}\n', "holds no training iteration (1 lines)"),
        ('{"iteration": 1, "lm_loss": 3}\nnot json\n', "metrics.jsonl, line 2 is not JSON"),
    ],
)
def test_what_cannot_be_drawn_is_said_clearly(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert run(main, [str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert message in error and str(tmp_path) in error
    assert not (tmp_path / "run.png").exists()
