"""Runs whose weights are to follow the plain formula of their optimizer."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gptpar.cli.check_layouts import MODELS, SMALL, case_config
from gptpar.cli.check_layouts.compare import difference
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.optim.muon import MUON, coefficients
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import case

COMMON = [*SMALL.split(), *MODELS["llama"].split(), "--fp64", "--lr", "1e-3", "--weight-decay", "0.3"]
"""A model with query groups and gates: a QKV weight has three matrices, and gate and up projection are two. It has no
key biases: their gradient is zero but for rounding, and Lion would take the sign of that."""
LION_WORDS = [*COMMON, *("--num-layers", "2", "--optimizer", "lion", "--lion-beta2", "0.95")]
MUON_WORDS = [*COMMON, *("--num-layers", "4", "--optimizer", "muon", "--muon-coefficient-type", "simple")]

STEPS, CLIP = 3, 0.5
HEAD, QUERIES = 4, 2
"""Rows of a head, and heads of queries in a group."""

Update = Callable[[str, Tensor, Tensor, float, int], None]
"""Changes a decayed parameter of a name by its gradient, at a learning rate, in a step that is counted from 1."""


def assert_follows(words: Sequence[str], flags: str, update: Update, optimizer: str | None = None) -> None:
    """Every weight after each step is what an update makes of the weight before it and the run's gradient.

    Args:
        optimizer: one that no flag knows.
    """
    config = case_config(words, case(Mesh(), *flags.split()), 1)
    run = CaseRun(
        config.update("optimizer", optimizer=optimizer or config.optimizer.optimizer),
        Topology(Mesh(), 0, torch.device("cpu")),
    )
    run.train(0, STEPS)
    run.trainer.close()
    weights = {name: value.clone() for name, value in run.outcome.initial.items()}
    for step, (grads, found) in enumerate(zip(run.outcome.gradients, run.outcome.weights, strict=True), start=1):
        norm = float(torch.cat([grad.flatten() for grad in grads.values()]).norm())
        assert norm > CLIP
        lr = run.trainer.schedule.learning_rate(8.0 * step)
        for name, p in weights.items():
            p.mul_(1 - lr * (0.3 if p.dim() > 1 else 0.0))
            update(name, p, grads[name] * CLIP / (norm + 1e-6), lr, step)
        assert difference([(found, weights)]) <= 1e-12


def momentum() -> Update:
    """The momenta are the weights of the gradients before, as torch's SGD has them."""
    momenta: dict[str, Tensor] = {}

    def update(name: str, p: Tensor, grad: Tensor, lr: float, step: int) -> None:
        momenta[name] = 0.9 * momenta.get(name, 0.0) + grad
        p.sub_(lr * momenta[name])

    return update


def lion() -> Update:
    """Lion's update, which remembers its momenta."""
    momenta: dict[str, Tensor] = {}

    def update(name: str, p: Tensor, grad: Tensor, lr: float, step: int) -> None:
        before = momenta.get(name, torch.zeros_like(p))
        p.sub_(lr * torch.sign(0.9 * before + (1 - 0.9) * grad))
        momenta[name] = 0.95 * before + (1 - 0.95) * grad

    return update


def muon() -> Update:
    """Muon's update of the matrices of blocks and Adam's of the others, which remember their moments."""
    state: dict[str, tuple[Tensor, Tensor]] = {}

    def update(name: str, p: Tensor, grad: Tensor, lr: float, step: int) -> None:
        first, second = state.setdefault(name, (torch.zeros_like(p), torch.zeros_like(p)))
        if name.startswith("layers.") and p.dim() > 1:
            first.lerp_(grad, 1 - 0.95)
            p.sub_(lr * _of_each_matrix(name, grad.lerp(first, 0.95)))
            return
        first.lerp_(grad, 1 - 0.9)
        second.mul_(0.999).addcmul_(grad, grad, value=1 - 0.999)
        root = (second / (1 - 0.999**step)).sqrt() + 1e-6
        p.sub_(lr / (1 - 0.9**step) * first / root)

    return update


def _of_each_matrix(name: str, update: Tensor) -> Tensor:
    """The update of a block's weight, whose logical matrices are orthogonalized one by one, as torch's Muon does."""
    muon = replace(MUON, iterations=coefficients("simple", 5))
    if "qkv" not in name:
        matrices = update.view(-1, *update.shape[-2:])
        return torch.stack([muon.orthogonalize(matrix[None])[0] for matrix in matrices]).view_as(update)
    groups = update.view(-1, (QUERIES + 2) * HEAD, update.shape[1])
    kinds = groups.split([QUERIES * HEAD, HEAD, HEAD], dim=1)
    done = [muon.orthogonalize(kind.reshape(1, -1, update.shape[1])).view_as(kind) for kind in kinds]
    return torch.cat(done, 1).view_as(update)
