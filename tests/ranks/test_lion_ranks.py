"""Lion on two processes follows a plain loop: each ZeRO stage, tensor and pipeline parallelism, at several ratios."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptpar.cli.check_layouts import case_config
from gptpar.cli.check_layouts.compare import difference
from gptpar.cli.check_layouts.outcome import Outcome, Tensors
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.layout import Layout
from tests.ranks.layout_cases import case
from tests.spawn import spawn
from tests.unit.optim.lion_runs import STEPS, TOLERANCE, WORDS, plain_loop

DATA, TENSOR, PIPELINE = Layout(data=2), Layout(tensor=2), Layout(pipeline=2)
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
"""Each takes its last step from what the one before saved, the first from its own."""


def run_all(rank: int, folder: Path) -> list[Outcome]:
    """The outcomes are the main process's."""
    outcomes = []
    topologies: dict[Layout, Topology] = {}
    for number, (layout, flags) in enumerate(CASES):
        if layout not in topologies:
            topologies[layout] = make_topology(layout, rank, torch.device("cpu"))
        run = CaseRun(case_config(WORDS, case(layout, *flags.split()), 2), topologies[layout])
        run.train(0, STEPS - 1)
        run.save(folder / str(number), STEPS - 1)
        run.resume(folder / str(max(0, number - 1)))
        run.train(STEPS - 1, STEPS)
        run.trainer.close()
        outcomes.append(run.outcome)
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Outcome], list[Tensors]]:
    return spawn(run_all, 2, tmp_path_factory.mktemp("lion"), timeout_s=300)[0], plain_loop(STEPS)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[flags for _, flags in CASES])
def test_training_follows_a_plain_loop(outcomes: tuple[list[Outcome], list[Tensors]], number: int) -> None:
    found, wanted = outcomes
    assert difference(zip(found[number].weights, wanted, strict=True)) <= TOLERANCE
