import json
import math
from pathlib import Path

import pytest

from gptpar.cli.plot import main
from gptpar.reporting.curves import load_run
from gptpar.reporting.figures.runs import draw_runs


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
