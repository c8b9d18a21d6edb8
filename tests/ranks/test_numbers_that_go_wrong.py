"""An outlier is skipped alike in every layout, and each layer's norms are those of one process, to 1e-10 in fp64."""

from pathlib import Path

import torch

from gptpar.cli.check_layouts import case_config
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config import Config
from gptpar.data.loader import MicroBatch
from gptpar.errors import GptparError
from gptpar.run.health.replicas import ReplicaCheck
from gptpar.topology.groups import make_topology
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import FEWER_SAMPLES, WORDS, Family, assert_equals_one_process, at, case
from tests.spawn import spawn

FLAGS = [*FEWER_SAMPLES, *["--skip-step-sigma", "8", "--skip-step-window", "4", "--log-layer-norms-interval", "1"]]
SPIKE, SAVED, STEPS = 4, 5, 6


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


def test_the_same_step_is_skipped_and_norms_are_those_of_one_process(tmp_path: Path) -> None:
    cases = [
        at("dp2", "--zero-stage 0", "CPU optimizer 0.6"),
        at("dp2", "--zero-stage 3", "CPU optimizer 0.6"),
        at("tp2", "--sequence-parallel", "all on the CPU"),
        at("pp2"),
    ]
    alone = assert_equals_one_process(Family(FLAGS, cases, SpikedRun, SAVED, STEPS), tmp_path)
    assert skipped(alone) == [SPIKE]
    assert len(alone.steps[0]) > 2 + 3 * 4  # loss, norm, and three norms a layer


# Replicas.

DATA, TENSOR, PIPELINE = Mesh(data=2), Mesh(tensor=2), Mesh(pipeline=2)
REPLICAS = [
    (DATA, "--zero-stage 0", "layers.0.attention.qkv.weight"),
    (DATA, "--zero-stage 2", "layers.0.attention.qkv.weight"),
    (TENSOR, "--tensor-model-parallel-size 2", "final_norm.weight"),
    (PIPELINE, "--pipeline-model-parallel-size 2", "embedding.weight"),
]


def flip_a_bit(config: Config, rank: int, mesh: Mesh, name: str) -> str:
    """What the check says after one bit of one weight changed on the last process, having passed before."""
    run = CaseRun(config, make_topology(mesh, rank, torch.device("cpu")))
    check = ReplicaCheck(run.trainer.engine, run.topology)
    run.train(0, 1)
    check.check(1)
    run.train(1, 2)
    check.check(2)
    if rank == 1:
        view = run.trainer.engine.parameters.views()[name]
        view.view(torch.int64).view(-1)[-1] ^= 1
    try:
        check.check(3)
        return ""
    except GptparError as error:
        return str(error)
    finally:
        run.trainer.close()


def flip_bits(rank: int) -> list[str]:
    found = []
    for mesh, flags, name in REPLICAS:
        config = case_config(WORDS, case(mesh, *flags.split()), 2)
        run = CaseRun(config, make_topology(mesh, rank, torch.device("cpu")))
        names = list(run.trainer.engine.table.params)
        run.trainer.close()
        found.append(f"{flip_a_bit(config, rank, mesh, _nearest(name, names))}")
    return found


def _nearest(name: str, names: list[str]) -> str:
    """The parameter of that name, or the first weight of its layer."""
    layer = name.rsplit(".", 1)[0].split(".attention")[0]
    return name if name in names else next(one for one in names if one.startswith(layer))


def test_one_flipped_bit_is_told_with_its_parameter_and_ranks() -> None:
    first, second = spawn(flip_bits, 2)
    assert first == second
    for told, (_, _, name) in zip(first, REPLICAS, strict=True):
        assert "after iteration 3 copies of the same weights differ" in told and "rank 0 against rank 1" in told, told
        assert name.split(".")[0] in told and "--ckpt-step" in told
