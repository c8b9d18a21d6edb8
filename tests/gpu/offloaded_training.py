"""Steps of the tiny model on a GPU with its optimizer on the host."""

import time
from collections.abc import Callable
from typing import Any

import torch

from gptpar.data.loader import MicroBatch
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.elementwise import Done
from gptpar.optim.schedule import make_schedule
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.trainer import Trainer
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.helpers import random_tokens, tiny_config

STEPS = 12
OFFLOAD = "--cpu-optimizer --cpu-optimizer-ratio"
Result = tuple[list[list[float]], dict[str, torch.Tensor], Trainer]
"""(loss, norm, skipped) of each step, and the final weights by name."""


def run(flags: str, steps: int = STEPS, micro_batches: int = 2) -> Result:
    config = tiny_config(f"--hidden-size 128 --global-batch-size 4 --lr-warmup-iters 3 {flags}")
    topology = Topology(Mesh(), 0, torch.device("cuda", 0))
    trainer = Trainer(config, topology, make_schedule(config, BatchPlan.of(config.batch).train_samples))
    trainer.initialise()
    seen, launched = [], None
    for step in range(steps):
        parts = [MicroBatch(t[:, :-1], t[:, 1:]) for t in random_tokens(4, 16, 60, seed=step).split(4 // micro_batches)]
        trainer.expect_step(4.0 * step)
        loss = trainer.forward_backward(parts, step)
        if launched is not None:  # one step late, as a run does it
            seen.append(launched.readings.read()[:3])
        launched = trainer.update(loss, iteration=step + 1, samples=4, progress=4.0 * step, stop=False)
        if trainer.loss_scale.dynamic:
            trainer.loss_scale.update(bool(launched.readings.read()[2]))
    assert launched is not None
    seen.append(launched.readings.read()[:3])
    whole = {}
    for name, parts in trainer.engine.optimizer.state_tensors()["weights"].items():
        full = torch.empty(parts.shape, dtype=parts.dtype)
        for offsets, part in parts.parts:
            full[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))] = part.cpu()
        whole[name] = full
    trainer.close()
    return seen, whole, trainer


def assert_same_bits(found: Result, wanted: Result) -> None:
    """What two runs read in each step, and their final weights."""
    pairs = zip(found[0], wanted[0], strict=True)
    assert not [(step, one, other) for step, (one, other) in enumerate(pairs) if one != other]
    assert not [name for name, values in wanted[1].items() if not torch.equal(found[1][name], values)]


class Slow(CpuAdam):
    """Leaves the device time to write where it should not."""

    def order(self, *args: Any, **kwargs: Any) -> Callable[[], Done]:
        time.sleep(0.01)
        return super().order(*args, **kwargs)
