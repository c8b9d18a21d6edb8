"""Muon on several processes follows a plain loop: ZeRO, tensor and pipeline parallelism, at several ratios."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptpar.cli.check_layouts.compare import difference
from gptpar.cli.check_layouts.outcome import Outcome, Tensors
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import chained_outcomes
from tests.spawn import spawn
from tests.unit.optim.muon_runs import STEPS, TOLERANCE, WORDS, plain_loop

DATA, TENSOR, PIPELINE = Mesh(data=2), Mesh(tensor=2), Mesh(pipeline=2)
ON_HOST = "--cpu-optimizer --cpu-optimizer-ratio"
ONE_PASS = "--micro-batch-size 4"
TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
OF_TWO = [
    (DATA, f"--zero-stage 0 {ON_HOST} 0.3"),
    (DATA, f"--zero-stage 1 {ONE_PASS}"),
    (DATA, f"--zero-stage 2 {ON_HOST} 1 {ONE_PASS}"),
    (DATA, f"--zero-stage 3 {ON_HOST} 0.3"),
    (DATA, f"--zero-stage 3 {ON_HOST} 1 --cpu-parameters"),
    (DATA, "--zero-stage 3"),
    (TENSOR, f"{TP} --sequence-parallel {ON_HOST} 0.3"),
    (TENSOR, f"{TP} --micro-batch-size 8"),
    (TENSOR, f"{TP} {ON_HOST} 1"),
    (PIPELINE, f"{PP} {ON_HOST} 1"),
    (PIPELINE, f"{PP} --num-layers-per-virtual-pipeline-stage 1"),
]
"""Each takes its last step from the checkpoint of the case before, the first from its own."""
OF_FOUR = [
    (Mesh(data=4), f"--zero-stage 1 {ON_HOST} 0.3"),
    (Mesh(data=4), "--zero-stage 3 --micro-batch-size 2"),
    (Mesh(data=2, tensor=2), f"--zero-stage 1 {TP} --sequence-parallel"),
    (Mesh(data=2, tensor=2), f"--zero-stage 3 {TP} {ON_HOST} 0.3"),
    (Mesh(data=2, tensor=2), f"--zero-stage 0 {TP}"),
    (Mesh(tensor=2, pipeline=2), f"{TP} {PP} {ON_HOST} 0.3"),
    (Mesh(data=2, pipeline=2), f"--zero-stage 1 {PP}"),
]


def run_all(rank: int, folder: Path, cases: list[tuple[Mesh, str]]) -> list[Outcome]:
    return chained_outcomes(rank, folder, cases, WORDS, saved=STEPS - 1, steps=STEPS)


@pytest.fixture(scope="module")
def wanted() -> list[Tensors]:
    return plain_loop(STEPS)


@pytest.mark.parametrize("cases", [OF_TWO, OF_FOUR], ids=["two processes", "four processes"])
def test_training_follows_a_plain_loop(cases: list[tuple[Mesh, str]], wanted: list[Tensors], tmp_path: Path) -> None:
    found = spawn(run_all, cases[0][0].world_size, tmp_path, cases, timeout_s=500)[0]
    apart = {
        flags: difference(zip(one.weights, wanted, strict=True)) for (_, flags), one in zip(cases, found, strict=True)
    }
    assert max(apart.values()) <= TOLERANCE, apart
