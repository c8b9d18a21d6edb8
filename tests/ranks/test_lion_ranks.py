"""Lion on two processes follows a plain loop: each ZeRO stage, tensor and pipeline parallelism, at several ratios."""

from __future__ import annotations

from pathlib import Path

import pytest

from gptpar.cli.check_layouts.compare import difference
from gptpar.cli.check_layouts.outcome import Outcome, Tensors
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import chained_outcomes
from tests.spawn import spawn
from tests.unit.optim.lion_runs import STEPS, TOLERANCE, WORDS, plain_loop

DATA, TENSOR, PIPELINE = Mesh(data=2), Mesh(tensor=2), Mesh(pipeline=2)
CASES = [
    (DATA, "--zero-stage 0 --cpu-optimizer --cpu-optimizer-ratio 0.3"),
    (DATA, "--zero-stage 1"),
    (DATA, "--zero-stage 2 --cpu-optimizer --cpu-optimizer-ratio 1"),
    (DATA, "--zero-stage 3 --cpu-optimizer --cpu-optimizer-ratio 0.3"),
    (TENSOR, "--tensor-model-parallel-size 2 --sequence-parallel --cpu-optimizer --cpu-optimizer-ratio 0.3"),
    (TENSOR, "--tensor-model-parallel-size 2"),
    (PIPELINE, "--pipeline-model-parallel-size 2 --cpu-optimizer --cpu-optimizer-ratio 1"),
    (PIPELINE, "--pipeline-model-parallel-size 2"),
]
"""Each takes its last step from the checkpoint of the case before, the first from its own."""


def run_all(rank: int, folder: Path) -> list[Outcome]:
    return chained_outcomes(rank, folder, CASES, WORDS, saved=STEPS - 1, steps=STEPS)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Outcome], list[Tensors]]:
    return spawn(run_all, 2, tmp_path_factory.mktemp("lion"), timeout_s=300)[0], plain_loop(STEPS)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[flags for _, flags in CASES])
def test_training_follows_a_plain_loop(outcomes: tuple[list[Outcome], list[Tensors]], number: int) -> None:
    found, wanted = outcomes
    assert difference(zip(found[number].weights, wanted, strict=True)) <= TOLERANCE
