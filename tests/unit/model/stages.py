"""Models and parts of them in one process, with weights in which mistakes show."""

import torch
from torch import nn

from gptpar.config import ModelConfig
from gptpar.model.gpt import gpt_model
from gptpar.pipeline import Stage
from gptpar.topology.initial_values import initialise
from tests.helpers import inits_of_stage, tiny_config


def initial_stage(config: ModelConfig, dtype: torch.dtype, recompute_modules: frozenset[str] = frozenset()) -> Stage:
    """A model with its initial weights."""
    stage = Stage(gpt_model(config, recompute_modules=recompute_modules).specs)
    weights = {name: torch.empty(p.shape, dtype=dtype) for name, p in stage.global_parameters().items()}
    initialise(weights, inits_of_stage(stage), seed=3)
    stage.place(weights)
    return stage


def stage_of(flags: str, recompute_modules: frozenset[str] = frozenset()) -> Stage:
    """The tiny model with further flags and its initial weights, in fp64."""
    return initial_stage(tiny_config(flags).model, torch.float64, recompute_modules)


def gradients_of(stage: Stage, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each parameter."""
    parameters = stage.global_parameters()
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def require_same(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], rtol: float = 1e-9, atol: float = 1e-13
) -> None:
    """Gradients of the same parameters, up to rounding in fp64."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=name)


def filled(module: nn.Module, seed: int = 5) -> dict[str, torch.Tensor]:
    """Random weights in fp64."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return dict(module.named_parameters())
