"""DeepSpeed's CSV files: names, headers, rows, and what a run that goes on leaves of them."""

from __future__ import annotations

from pathlib import Path

from gptpar.reporting.sinks import CsvSink
from tests.unit.reporting.records import record


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_each_curve_is_a_file_of_samples_and_values(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "out" / "job", with_loss_scale=True)
    sink.iteration(record(1, loss_scale=65536.0, lm_loss=float("nan")))
    sink.iteration(record(2, loss_scale=32768.0, learning_rate=2.5e-5))
    assert contents(tmp_path / "out" / "job") == {  # on the disk before it is closed
        "Train_Samples_loss_scale.csv": b"step,loss_scale\r\n8,65536.0\r\n16,32768.0\r\n",
        "Train_Samples_lr.csv": b"step,lr\r\n8,0.0001\r\n16,2.5e-05\r\n",
        "Train_Samples_train_loss.csv": b"step,train_loss\r\n8,nan\r\n16,4.8\r\n",
    }
    sink.close()


def test_a_run_that_goes_on_drops_the_rows_that_it_writes_again(tmp_path: Path) -> None:
    path = tmp_path / "Train_Samples_lr.csv"
    path.write_bytes(b"step,lr\r\n8,0.1\r\n16,0.2\r\n24,0.3\r\n32,0.")
    sink = CsvSink(tmp_path, resume_samples=16)
    sink.iteration(record(3))
    sink.close()
    assert path.read_bytes() == b"step,lr\r\n8,0.1\r\n16,0.2\r\n24,0.0001\r\n"
    sink = CsvSink(tmp_path)  # a new run: as with DeepSpeed, its rows follow
    sink.iteration(record(1))
    sink.close()
    assert path.read_bytes().endswith(b"\r\n24,0.0001\r\n8,0.0001\r\n")
