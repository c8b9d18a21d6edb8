"""An outlier is skipped alike in every layout, and each layer's norms are those of one process, to 1e-10 in fp64."""

from pathlib import Path

import pytest
import torch

from gptpar.cli.check_layouts import case_config
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.data.loader import MicroBatch
from gptpar.errors import GptparError
from gptpar.run.health.replicas import ReplicaCheck
from gptpar.topology.groups import make_topology
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import FEWER_SAMPLES, Family, Pools, assert_equals_one_process, at, case

FLAGS = [*FEWER_SAMPLES, *["--skip-step-sigma", "8", "--skip-step-window", "3", "--log-layer-norms-interval", "1"]]
SPIKE, SAVED, STEPS = 3, 4, 5


class SpikedRun(CaseRun):
    """One batch is a single token, again and again: its gradient is far larger than that of random tokens."""

    def _batches(self, step: int) -> list[MicroBatch]:
        batches = super()._batches(step)
        if step != SPIKE:
            return batches
        return [MicroBatch(torch.zeros_like(one.tokens_BS), torch.zeros_like(one.labels_BS)) for one in batches]


def skipped(outcome: Outcome) -> list[int]:
    """The steps that left all weights as they were."""
    states = [outcome.initial, *outcome.weights]
    pairs = enumerate(zip(states, states[1:], strict=False))
    return [step for step, (old, new) in pairs if all(torch.equal(old[name], new[name]) for name in old)]


def test_the_same_step_is_skipped_and_norms_are_those_of_one_process(tmp_path: Path, ranks: Pools) -> None:
    cases = [
        at("dp2", "--zero-stage 0", "CPU optimizer 0.6"),
        at("dp2", "--zero-stage 3", "CPU optimizer 0.6"),
        at("tp2", "--sequence-parallel", "all on the CPU"),
        at("pp2"),
    ]
    alone = assert_equals_one_process(Family(FLAGS, cases, SpikedRun, SAVED, STEPS), tmp_path, ranks)
    assert skipped(alone) == [SPIKE]
    assert len(alone.steps[0]) > 2 + 3 * 4  # loss, norm, and three norms a layer


REPLICAS = [
    (Mesh(data=2), "--zero-stage 0", "layers.0.attention.qkv.weight"),
    (Mesh(data=2), "--zero-stage 2", "layers.0.attention.qkv.weight"),
    (Mesh(tensor=2), "--tensor-model-parallel-size 2", "final_norm.weight"),
    (Mesh(pipeline=2), "--pipeline-model-parallel-size 2", "embedding.weight"),
]
"""Layouts whose processes have copies of a weight."""


def flip_bits(rank: int) -> list[str]:
    """What the check says after one bit of one weight changed on the last process, having passed before."""
    found = []
    for mesh, flags, name in REPLICAS:
        config = case_config(FEWER_SAMPLES, case(mesh, *flags.split()), 2)
        run = CaseRun(config, make_topology(mesh, rank, torch.device("cpu")))
        check = ReplicaCheck(run.trainer.engine, run.topology)
        run.train(0, 1)
        check.check(1)
        if rank == 1:
            run.trainer.engine.parameters.views()[name].view(torch.int64).view(-1)[-1] ^= 1
        with pytest.raises(GptparError) as error:
            check.check(2)
        found.append(str(error.value))
        run.trainer.close()
    return found


def test_one_flipped_bit_is_told_with_its_parameter_and_ranks(ranks: Pools) -> None:
    first, second = ranks(2).run(flip_bits)
    assert first == second
    for told, (*_, name) in zip(first, REPLICAS, strict=True):
        assert "after iteration 2 copies of the same weights differ" in told and "rank 0 against rank 1" in told, told
        assert name in told and "--ckpt-step" in told
