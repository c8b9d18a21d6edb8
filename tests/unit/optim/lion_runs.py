"""Runs that train with Lion, and the plain loop beside them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from gptpar.cli.check_layouts import MODELS, SMALL, case_config
from gptpar.cli.check_layouts.outcome import Tensors
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.model.gpt import gpt_model
from gptpar.pipeline import Stage
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import case

WORDS = [
    *SMALL.split(),
    *MODELS["llama"].split(),
    *("--fp64", "--num-layers", "2", "--optimizer", "lion", "--lion-beta2", "0.95"),
    *("--lr", "1e-3", "--weight-decay", "0.3"),
]
"""A model without key biases: their gradient is zero but for rounding, and Lion would take the sign of that."""

STEPS = 3
TOLERANCE = 1e-12


def plain_loop(steps: int) -> list[Tensors]:
    """Every parameter after each step; nothing but torch, in fp64."""
    run = alone(())
    model = Stage(gpt_model(run.config.model).specs)
    model.place({name: value.clone() for name, value in run.outcome.initial.items()})
    named, found = model.global_parameters(), []
    momenta = {name: torch.zeros_like(p) for name, p in named.items()}
    for step in range(steps):
        model.zero_grad()
        for batch in run._batches(step):
            logits = model(batch.tokens_BS, {"seq_length": batch.tokens_BS.shape[1]})
            (F.cross_entropy(logits, batch.labels_BS.flatten()) / len(run._batches(step))).backward()
        torch.nn.utils.clip_grad_norm_(list(named.values()), 0.5)
        lr = run.trainer.schedule.learning_rate(8.0 * (step + 1))
        with torch.no_grad():
            for name, p in named.items():
                assert p.grad is not None
                p.mul_(1 - lr * (0.3 if p.dim() > 1 else 0.0))
                p.sub_(lr * torch.sign(0.9 * momenta[name] + (1 - 0.9) * p.grad))
                momenta[name] = 0.95 * momenta[name] + (1 - 0.95) * p.grad
        found.append({name: p.detach().clone() for name, p in named.items()})
    run.trainer.close()
    return found


def alone(flags: Sequence[str]) -> CaseRun:
    config = case_config(WORDS, case(Mesh(), *flags), 1)
    return CaseRun(config, Topology(Mesh(), 0, torch.device("cpu")))
