"""``gptpar benchmark --sweep`` as a user runs it: two processes on a CPU."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.commands import ENVIRONMENT, command
from tests.e2e.quick_python import quick_python
from tests.helpers import TINY

SWEEP = (
    f"{TINY.replace('--micro-batch-size 2 --train-iters 20 ', '')} --nproc-per-node 2 --steps 3 --warmup-steps 1 "
    "--sweep --sweep-layouts dp2 pp2 --sweep-micro-batches 1 2 "
)


def test_two_layouts_and_two_micro_batches(tmp_path: Path) -> None:
    """Measured rows, fastest first, each a JSON line; one more layout is refused with its reason."""
    file, picture = tmp_path / "lines.jsonl", tmp_path / "sweep.png"
    words = command(f"{SWEEP.replace('pp2', 'tp3')} --json-lines {file} --png {picture}", "benchmark")[1:]
    with quick_python() as python:
        done = subprocess.run([python, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    rows = re.findall(r"^ *(dp\d x tp\d x pp\d) +(\d) +([\d,.]+) +([\d,.]+) +- +-$", output, re.MULTILINE)
    assert {row[:2] for row in rows} == {("dp2 x tp1 x pp1", m) for m in "12"}
    speeds = [float(row[2].replace(",", "")) for row in rows]
    assert speeds == sorted(speeds, reverse=True) and speeds[-1] > 0
    assert "2 processes cannot be cut into groups of 3 x 1" in output
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((line["tokens_per_s"] for line in lines), reverse=True) == speeds
    assert {(line["layout"], line["micro_batch_size"]) for line in lines} == {(row[0], int(row[1])) for row in rows}
    assert all(line["global_batch_size"] == 4 and line["steps"] == 3 for line in lines)
    assert all(line["tokens_per_s"] == pytest.approx(64 / line["ms_per_step"] * 1e3, rel=1e-3) for line in lines)
    assert picture.stat().st_size > 5_000
