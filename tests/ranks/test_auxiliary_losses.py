"""Losses that blocks return beside their outputs: every layout adds their gradients as plain autograd does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gptpar.cli.check_layouts import SMALL, case_config
from gptpar.cli.check_layouts.compare import difference, step_difference
from gptpar.cli.check_layouts.outcome import Outcome, Tensors
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config import Config, ModelConfig
from gptpar.config.roles import Role
from gptpar.model import gpt
from gptpar.model.block import Block
from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec
from gptpar.model.spec import ModelLayer, ModelSpec
from gptpar.pipeline.stage import Stage
from gptpar.plan.space import spaces
from gptpar.plan.space.candidate import flags_of
from gptpar.run import gpt as gpt_engine
from gptpar.tensor_parallel import ALONE, TensorAxis
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.initial_values import Normal
from gptpar.topology.mesh import Mesh
from gptpar.topology.placement import ParameterSpec
from tests.ranks.layout_cases import case
from tests.spawn import spawn

WORDS = [*SMALL.split(), "--num-layers", "4", "--fp64"]
TOLERANCE = 1e-10
SEQUENCE = ("--sequence-parallel",)
VARIANTS = {option.name: flags_of(option.changes) for option in spaces.VARIANTS}
RECOMPUTED = tuple(VARIANTS["full recompute"])
INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")
CASES = [
    (Mesh(data=2), ("--zero-stage", "1")),
    (Mesh(data=2), ("--zero-stage", "3", *RECOMPUTED)),
    (Mesh(data=2), ("--zero-stage", "3", *VARIANTS["CPU optimizer 0.6"])),
    (Mesh(tensor=2), ()),
    (Mesh(tensor=2), (*SEQUENCE, *VARIANTS["every 2"])),
    (Mesh(tensor=2), (*SEQUENCE, *VARIANTS["selective"])),
    (Mesh(pipeline=2), ()),
    (Mesh(pipeline=2), (*INTERLEAVED, *RECOMPUTED)),
]


class TwoLossesBlock(Block):
    """Returns a z-loss (Chowdhery et al. 2022) of its scaled output, and the output's mean square."""

    def __init__(self, config: ModelConfig, axis: TensorAxis = ALONE, **kwargs: Any):
        super().__init__(config, axis, **kwargs)
        assert config.hidden_size
        self.declared = {"scale": ParameterSpec(Normal(1.0), axis.between_layers)}
        self.scale = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x_ND: torch.Tensor, *fields: Any) -> Any:
        y_ND = super().forward(x_ND, *fields)
        z = (self.scale * y_ND).logsumexp(-1).square().mean()
        return y_ND, {"z loss": 0.1 * z, "size": y_ND.square().mean()}


def described(config: ModelConfig, axis: TensorAxis = ALONE, **kwargs: Any) -> ModelSpec:
    """A GPT with such blocks; only every other one has the losses."""

    def changed(number: int, layer: ModelLayer) -> ModelLayer:
        if layer.role is not Role.BLOCK or number % 2:
            return layer
        old = layer.spec
        spec = LayerSpec(
            TwoLossesBlock,
            *old.args,
            name=old.name,
            batch_fields=old.batch_fields,
            auxiliary_losses=("z loss", "size"),
            **old.kwargs,
        )
        return ModelLayer(layer.role, spec)

    model = gpt.gpt_model(config, axis, **kwargs)
    return replace(model, layers=tuple(changed(number, layer) for number, layer in enumerate(model.layers)))


def config_of(mesh: Mesh, flags: tuple[str, ...]) -> Config:
    return case_config(WORDS, case(mesh, *flags), mesh.world_size)


def trained(mesh: Mesh, flags: tuple[str, ...], topology: Topology) -> Outcome:
    """Two steps: the second shows that sums begin anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_engine, "gpt_model", described)
        run = CaseRun(config_of(mesh, flags), topology)
        run.train(0, 2)
        run.trainer.close()
        return run.outcome


def run_all(rank: int) -> list[Outcome]:
    topologies = {mesh: make_topology(mesh, rank, torch.device("cpu")) for mesh, _ in CASES}
    return [trained(mesh, flags, topologies[mesh]) for mesh, flags in CASES]


def run_alone(flags: tuple[str, ...] = ()) -> Outcome:
    return trained(Mesh(), flags, Topology(Mesh(), 0, torch.device("cpu")))


def plain_step(weights: Tensors, config: Config) -> tuple[list[float], Tensors]:
    """(mean loss and auxiliary losses, gradients of their sum) of the first global batch, layer by layer."""
    model = described(config.model)
    stage = Stage(model.specs)
    stage.place({name: weight.clone() for name, weight in weights.items()})
    layers, parameters = stage.layers_by_name(), stage.global_parameters()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 90, (8, 17), generator=generator)  # as CaseRun draws them
    sums = {"lm": torch.zeros((), dtype=torch.float64), "z loss": torch.zeros(()), "size": torch.zeros(())}
    for sample in tokens.split(1):
        x, fields = sample[:, :-1], {"labels": sample[:, 1:], "seq_length": 16}
        for spec in model.specs:
            arguments = [x, *(fields.get(name) for name in spec.batch_fields)]
            layer: Any = layers[spec.name]
            tied = isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None
            returned = spec.forward_fn(layer, *arguments) if tied else layer(*arguments)
            x, losses = returned if spec.auxiliary_losses else (returned, {})
            for name, loss in losses.items():
                sums[name] = sums[name] + loss / 8
        sums["lm"] = sums["lm"] + x / 8
    grads = torch.autograd.grad(torch.stack([*sums.values()]).sum(), list(parameters.values()))
    return [value.item() for value in sums.values()], dict(zip(parameters, grads, strict=True))


@pytest.fixture(scope="module")
def alone() -> Outcome:
    return run_alone()


def test_one_process_computes_what_plain_autograd_does(alone: Outcome) -> None:
    values, gradients = plain_step(alone.initial, config_of(Mesh(), ()))
    loss, _, *auxiliary = alone.steps[0]
    assert [loss, *auxiliary] == pytest.approx(values, rel=1e-12)
    assert difference([(alone.gradients[0], gradients)]) <= TOLERANCE
    scale = gradients["layers.0.scale"]
    assert scale.abs().max() > 1e-6 and "layers.1.scale" not in gradients


@pytest.mark.parametrize("name", ["full recompute", "every 2", "selective"])
def test_recomputation_counts_nothing_twice(alone: Outcome, name: str) -> None:
    found = run_alone(tuple(VARIANTS[name]))
    assert step_difference(found.steps, alone.steps) <= TOLERANCE
    assert difference(zip(found.gradients, alone.gradients, strict=True)) <= TOLERANCE


def test_all_layouts_compute_the_same(alone: Outcome) -> None:
    outcomes = spawn(run_all, 2, timeout_s=300.0)[0]
    for (mesh, flags), found in zip(CASES, outcomes, strict=True):
        what = f"{mesh.describe()} {flags}"
        assert step_difference(found.steps, alone.steps) <= TOLERANCE, what
        assert difference(zip(found.gradients, alone.gradients, strict=True)) <= TOLERANCE, what
        assert difference(zip(found.weights, alone.weights, strict=True)) <= TOLERANCE, what
