"""Two processes compute what one does, however they share the work: test_layouts in a few seconds."""

from __future__ import annotations

import pytest
import torch

from gptpar.cli.check_layouts import case_config
from gptpar.cli.check_layouts.compare import difference, step_difference
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import FEWER_SAMPLES, STEPS, TOLERANCE, VARIANTS, case
from tests.spawn import spawn

pytestmark = pytest.mark.fast

CASES = [
    case(Mesh(data=2), "--zero-stage", "1"),
    case(Mesh(data=2), "--zero-stage", "2"),
    case(Mesh(data=2), "--zero-stage", "3", *VARIANTS["full recompute"]),
    case(Mesh(tensor=2)),
    case(Mesh(tensor=2), "--sequence-parallel", *VARIANTS["CPU optimizer 0.6"]),
    case(Mesh(pipeline=2)),
]


def run_all(rank: int) -> list[Outcome]:
    """Every case in turn in the same processes; the main one has the outcomes."""
    outcomes = []
    for this in CASES:
        run = CaseRun(case_config(FEWER_SAMPLES, this, 2), make_topology(this.mesh, rank, torch.device("cpu")))
        run.train(0, STEPS)
        run.trainer.close()
        outcomes.append(run.outcome)
    return outcomes


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Of the cases, from one start of two processes."""
    return spawn(run_all, 2)[0]


@pytest.fixture(scope="module")
def alone() -> Outcome:
    """The reference."""
    run = CaseRun(case_config(FEWER_SAMPLES, case(Mesh()), 1), Topology(Mesh(), 0, torch.device("cpu")))
    run.train(0, STEPS)
    return run.outcome


@pytest.mark.parametrize("number", range(len(CASES)), ids=[this.name for this in CASES])
def test_two_processes_equal_one(outcomes: list[Outcome], alone: Outcome, number: int) -> None:
    found = outcomes[number]
    assert difference([(found.initial, alone.initial)]) == 0
    assert len(found.steps) == STEPS
    assert step_difference(found.steps, alone.steps) <= TOLERANCE
    assert difference(zip(found.gradients, alone.gradients, strict=True)) <= TOLERANCE
    assert difference(zip(found.weights, alone.weights, strict=True)) <= TOLERANCE
