"""The curves of an engine in folders that other runs have written to."""

from pathlib import Path
from typing import Any

import pytest

from gptpar.adapter.monitor import Point, make_monitor
from gptpar.config.sections.logging import LoggingFlags
from gptpar.reporting.sinks import TensorBoardSink
from tests.unit.reporting.records import read_tensorboard


@pytest.mark.parametrize(("samples", "others"), [(0, [8, 800]), (80, [8])])
def test_a_new_engine_leaves_others_curves_and_a_resumed_one_cuts_them(
    samples: int, others: Any, tmp_path: Path
) -> None:
    logging = LoggingFlags(tensorboard_dir=str(tmp_path))
    sink = TensorBoardSink(tmp_path, logging)
    for step in (8, 800):
        sink.scalars(step, {"another's": 1.0})
    sink.close()
    monitor = make_monitor(logging, with_loss_scale=False, warn=pytest.fail, end=sink.close)
    assert monitor is not None
    monitor.write(Point(samples, samples + 8, learning_rate=0.1, loss_scale=1.0, lm_loss=1.0))
    monitor.finish(None, lambda: None)
    assert [step for step, _ in read_tensorboard(tmp_path)["another's"]] == others
