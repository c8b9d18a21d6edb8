"""docs/extending.md, "An elementwise optimizer": its code, trained at several ratios beside torch's own optimizer."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.cli.check_layouts.compare import difference
from gptpar.cli.check_layouts.outcome import Tensors
from gptpar.config.sections.optimizer import OptimizerConfig
from gptpar.data.loader import MicroBatch
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.optimizers import OPTIMIZERS
from tests.flat_parts import whole_tensors
from tests.helpers import make_trainer, random_tokens, tiny_config

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"
LR, DECAY, STEPS = 1e-2, 0.1, 3
WORDS = f"--fp64 --lr {LR} --lr-decay-style constant --weight-decay {DECAY} --clip-grad 0 --micro-batch-size 4"


def blocks() -> list[str]:
    section = PAGE.read_text().split("## An elementwise optimizer\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def momentum(monkeypatch: pytest.MonkeyPatch) -> ElementwiseOptimizer:
    """The page's optimizer, as its three pieces of code make it known."""
    module, registry, flag = blocks()
    names: dict[str, Any] = {}
    exec(module, names)
    exec(registry, {**names, "ADAMW": OPTIMIZERS["adam"], "LION": OPTIMIZERS["lion"]}, found := {})
    optimizer: ElementwiseOptimizer = found["OPTIMIZERS"]["momentum"]
    monkeypatch.setitem(OPTIMIZERS, "momentum", optimizer)
    ((name, default),) = re.findall(r"(\w+): float = flag\(([\d.]+),", flag)
    assert (name,) == optimizer.flags and '"momentum")' in flag
    monkeypatch.setattr(OptimizerConfig, name, float(default), raising=False)
    return optimizer


def trained(ratio: float) -> list[Tensors]:
    """Gradients and weights of each step, in turn."""
    config = tiny_config(f"{WORDS} --no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio {ratio}")
    trainer = make_trainer(config.update("optimizer", optimizer="momentum"))
    optimizer = trainer.engine.optimizer
    found = [whole_tensors(optimizer.parts("weights"))]
    for step in range(STEPS):
        tokens = random_tokens(4, 16, 60, seed=step)
        loss = trainer.forward_backward([MicroBatch(tokens[:, :-1], tokens[:, 1:])], step)
        found.append(whole_tensors(optimizer.parts("grad")))
        trainer.update(loss, iteration=step + 1, samples=4, progress=4.0 * step, stop=False)
        found.append(whole_tensors(optimizer.parts("weights")))
    trainer.close()
    return found


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_the_page_s_optimizer_is_torch_s(momentum: ElementwiseOptimizer, ratio: float) -> None:
    weights, *steps = trained(ratio)
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    reference = torch.optim.SGD(leaves.values(), lr=LR, momentum=0.9)
    for grads, after in zip(steps[::2], steps[1::2], strict=True):
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf.grad = grads[name]
                if leaf.dim() > 1:
                    leaf.mul_(1 - LR * DECAY)
        reference.step()
        assert difference([(after, {name: leaf.detach() for name, leaf in leaves.items()})]) <= 1e-12
