"""Training on a GPU against the same training on the CPU."""

from __future__ import annotations

import pytest
import torch

from gptpar.data.loader import MicroBatch
from gptpar.optim.schedule import make_schedule
from gptpar.topology.groups import Topology
from gptpar.topology.layout import Layout
from gptpar.training.batch_plan import BatchPlan
from gptpar.training.trainer import Trainer
from tests.helpers import random_tokens, tiny_config

pytestmark = pytest.mark.gpu

STEPS = 8


def run(device: str, flags: str) -> tuple[list[float], torch.Tensor]:
    """Losses and final weights of a few steps of two micro-batches each."""
    config = tiny_config(f"--hidden-size 128 --global-batch-size 4 {flags}")
    schedule = make_schedule(config, BatchPlan.of(config.batch).train_samples)
    trainer = Trainer(config, Topology(Layout(), 0, torch.device(device)), schedule)
    trainer.initialise()
    losses = []
    for step in range(STEPS):
        parts = [MicroBatch(t[:, :-1], t[:, 1:]) for t in random_tokens(4, 16, 60, seed=step).split(2)]
        loss = trainer.forward_backward(parts, step)
        launched = trainer.update(loss, iteration=step + 1, samples=4, progress=4 + step, stop=False)
        losses.append(launched.readings.read()[0])
    return losses, trainer.engine.optimizer.master.cpu()


@pytest.mark.parametrize("flags", ["", "--no-compile", "--swiglu --num-query-groups 2 --position-embedding-type rope"])
def test_fp32_follows_the_cpu(flags: str) -> None:
    """Compiled and not: losses to 1e-4 over eight steps; initial weights are equal by construction."""
    gpu, _ = run("cuda", flags)
    cpu, _ = run("cpu", flags)
    assert gpu == pytest.approx(cpu, rel=1e-4)


@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --loss-scale 1024"])
def test_sixteen_bits_stay_close_to_fp32(flags: str) -> None:
    gpu, _ = run("cuda", flags)
    cpu, _ = run("cpu", "")
    assert gpu == pytest.approx(cpu, rel=2e-2)


def test_the_same_run_twice_is_bit_identical() -> None:
    flags = "--bf16 --hidden-dropout 0.1 --attention-dropout 0"
    first, second = run("cuda", flags), run("cuda", flags)
    assert first[0] == second[0] and torch.equal(first[1], second[1])


def test_a_step_as_one_graph_is_bit_identical() -> None:
    """Eight steps, the third and later ones replayed, with clipping; a moving loss scale, too."""
    for flags in ("--bf16 --clip-grad 0.1", "--fp16 --initial-loss-scale 1e30 --hysteresis 1"):
        one_by_one = run("cuda", f"{flags} --cuda-graph off")
        as_graph = run("cuda", f"{flags} --cuda-graph on")
        assert one_by_one[0] == as_graph[0] and torch.equal(one_by_one[1], as_graph[1])
