"""Rounded moments in each layout: the numbers of one process to 1e-10 in fp64, and the same bits in the moments."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from gptpar.cli.check_layouts.compare import difference, step_difference
from gptpar.cli.check_layouts.outcome import Outcome, Tensors
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import FEWER_SAMPLES, TOLERANCE, outcomes_and_reference
from tests.spawn import spawn

DATA, TENSOR, PIPELINE = Mesh(data=2), Mesh(tensor=2), Mesh(pipeline=2)
CASES = [
    (DATA, "--zero-stage 1"),
    (TENSOR, "--tensor-model-parallel-size 2 --cpu-optimizer --cpu-optimizer-ratio 0.3"),
    (PIPELINE, "--pipeline-model-parallel-size 2"),
    (DATA, "--zero-stage 3 --cpu-optimizer --cpu-optimizer-ratio 0.6"),
]
"""Each goes on from the checkpoint of the case before, the first from its own."""

FLAGS = [*FEWER_SAMPLES, "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
SAVED, STEPS = 3, 5


class MomentsRun(CaseRun):
    """In its outcome, the last moments take the place of the initial weights."""

    def train(self, first: int, last: int) -> None:
        super().train(first, last)
        found = {kind: self._whole(self._state(kind)) for kind in ("exp_avg", "exp_avg_sq")}
        self.outcome.initial = {f"{kind}/{name}": value for kind, own in found.items() for name, value in own.items()}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    run_all = partial(outcomes_and_reference, saved=SAVED, steps=STEPS, kind=MomentsRun)
    return spawn(run_all, 2, tmp_path_factory.mktemp("rounded"), CASES, FLAGS, timeout_s=300)[0]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[flags for _, flags in CASES])
def test_every_layout_has_the_numbers_of_one_process(outcomes: list[Outcome], number: int) -> None:
    found, alone = outcomes[number], outcomes[-1]
    assert step_difference(found.steps, alone.steps) <= TOLERANCE
    assert difference(zip(found.weights, alone.weights, strict=True)) <= TOLERANCE
    assert found.initial.keys() == alone.initial.keys()
    assert all(moment.dtype == torch.bfloat16 for moment in found.initial.values())
    assert _share_of_equal_bits(found.initial, alone.initial) > 0.99  # gradients of keys' biases are round-off


def _share_of_equal_bits(found: Tensors, wanted: Tensors) -> float:
    equal = sum(int((found[name] == moment).sum()) for name, moment in wanted.items())
    return equal / sum(moment.numel() for moment in wanted.values())
