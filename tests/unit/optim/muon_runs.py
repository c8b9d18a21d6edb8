"""Runs that train with Muon, and the plain loop beside them."""

from __future__ import annotations

import math
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
    *("--fp64", "--num-layers", "4", "--optimizer", "muon", "--muon-coefficient-type", "simple"),
    *("--lr", "1e-3", "--weight-decay", "0.3"),
]
"""A model with query groups and gates: a QKV weight has three matrices, and gate and up projection are two."""

STEPS = 3
TOLERANCE = 1e-12
HEAD, QUERIES = 4, 2
"""Rows of a head, and heads of queries in a group."""


def plain_loop(steps: int) -> list[Tensors]:
    """Every parameter after each step; nothing but torch, in fp64."""
    run = alone(())
    model = Stage(gpt_model(run.config.model).specs)
    model.place({name: value.clone() for name, value in run.outcome.initial.items()})
    named, found = model.global_parameters(), []
    state = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in named.items()}
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
                first, second = state[name]
                if name.startswith("layers.") and p.dim() > 1:
                    first.lerp_(p.grad, 1 - 0.95)
                    p.sub_(lr * of_each_matrix(name, p.grad.lerp(first, 0.95)))
                    continue
                first.lerp_(p.grad, 1 - 0.9)
                second.mul_(0.999).addcmul_(p.grad, p.grad, value=1 - 0.999)
                root = (second / (1 - 0.999 ** (step + 1))).sqrt() + 1e-6
                p.sub_(lr / (1 - 0.9 ** (step + 1)) * first / root)
        found.append({name: p.detach().clone() for name, p in named.items()})
    run.trainer.close()
    return found


def of_each_matrix(name: str, update: torch.Tensor) -> torch.Tensor:
    """The update of a block's weight, whose logical matrices are orthogonalized one by one."""
    if "qkv" not in name:
        matrices = update.view(-1, *update.shape[-2:])
        return torch.stack([orthogonal(matrix) for matrix in matrices]).view_as(update)
    groups = update.view(-1, (QUERIES + 2) * HEAD, update.shape[1])
    kinds = groups.split([QUERIES * HEAD, HEAD, HEAD], dim=1)
    done = [orthogonal(kind.reshape(-1, update.shape[1])).view_as(kind) for kind in kinds]
    return torch.cat(done, 1).view_as(update)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """As torch.optim.Muon has it, without its cast to bf16, and with the scale of AdamW's learning rates."""
    (rows, columns), (a, b, c) = x.shape, (3.4445, -4.7750, 2.0315)
    x = x.T if rows > columns else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return 0.2 * math.sqrt(max(rows, columns)) * (x.T if rows > columns else x)


def alone(flags: Sequence[str]) -> CaseRun:
    config = case_config(WORDS, case(Mesh(), *flags), 1)
    return CaseRun(config, Topology(Mesh(), 0, torch.device("cpu")))
