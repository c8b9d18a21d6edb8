"""Outliers on a GPU: recorded steps and the CPU optimizer's speculation decide as launched steps do."""

import pytest
import torch

from gptpar.data.loader import MicroBatch
from gptpar.optim.schedule import make_schedule
from gptpar.optim.skip_step import OUTLIER, SkipStep
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.trainer import Trainer
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.helpers import random_tokens, tiny_config

pytestmark = pytest.mark.gpu

STEPS, SPIKE = 10, 7


def trained(flags: str) -> tuple[list[list[float]], torch.Tensor]:
    """Loss, norm and why it was skipped of each step, and the final master weights."""
    config = tiny_config(f"--skip-step-sigma 4 --skip-step-window 6 {flags}")
    topology = Topology(Mesh(), 0, torch.device("cuda", 0))
    trainer = Trainer(config, topology, make_schedule(config, BatchPlan.of(config.batch).train_samples))
    trainer.initialise()
    launched = []
    for step in range(STEPS):
        tokens = random_tokens(2, 16, 60, seed=step) * (step != SPIKE)
        trainer.expect_step(2.0 * step + 2)
        loss = trainer.forward_backward([MicroBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())], step)
        launched.append(trainer.update(loss, iteration=step + 1, samples=2, progress=2.0 * step + 2, stop=False))
    found = [one.readings.read()[:3] for one in launched]
    parts = trainer.engine.optimizer.parts("weights")
    weights = torch.cat([part.reshape(-1).cpu() for one in parts.values() for _, part in one.parts])
    trainer.close()
    return found, weights


@pytest.mark.parametrize("flags", ["--cuda-graph on", "--cpu-optimizer --cpu-optimizer-ratio 1 --cuda-graph on"])
def test_the_same_step_is_skipped_with_the_same_bits(flags: str) -> None:
    wanted, weights = trained("--bf16 --cuda-graph off")
    found, same = trained(f"--bf16 {flags}")
    assert [reason for *_, reason in wanted] == [OUTLIER if step == SPIKE else 0.0 for step in range(STEPS)]
    assert found == wanted
    if "cpu-optimizer" not in flags:  # with the ratio, parts come in another order
        assert torch.equal(weights, same)


def test_the_device_decides_without_a_wait() -> None:
    rule = SkipStep(4.0, 8, torch.device("cuda"))
    pair = torch.ones(2, dtype=torch.float64, device="cuda")
    skipped = torch.zeros((), device="cuda")
    rule.reason(rule.judge(*pair) * 0 + skipped)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            rule.judge(*pair)
            rule.reason(skipped)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert rule.window()["losses"] == [1.0] * 8
