"""Units with copies on a part of the data axis: a layer of experts computes one process's numbers in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gptpar.cli.check_layouts import SMALL, case_config
from gptpar.cli.check_layouts.compare import difference, step_difference
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config import ModelConfig
from gptpar.config.roles import Role
from gptpar.model import gpt
from gptpar.model.block import Block
from gptpar.model.experts.dispatch import ExpertAxis, on_their_ranks
from gptpar.model.experts.products import Places, combined, places_of, scattered
from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec
from gptpar.model.spec import ModelLayer, ModelSpec
from gptpar.run import gpt as gpt_engine
from gptpar.tensor_parallel import ALONE, TensorAxis
from gptpar.tensor_parallel.collectives import copy_to, sum_over
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.initial_values import Normal
from gptpar.topology.mesh import Mesh
from gptpar.topology.placement import REPLICATED, ParameterSpec
from tests.ranks.layout_cases import VARIANTS, case
from tests.spawn import spawn

NUM_EXPERTS, TOP_K, WIDTH = 4, 2, 6
SIZES = "--global-batch-size 16 --micro-batch-size 2 --seq-length 8"
WORDS = [*SMALL.split(), *SIZES.split(), "--fp64", "--clip-grad", "0.05"]
ONE, FOUR = ("--micro-batch-size", "4"), ("--micro-batch-size", "1")
"""Micro-batches of four data ranks; otherwise they have two."""
STEPS = 2
TOLERANCE = 1e-10
OFFLOADED = (*VARIANTS["all on the CPU"], "--cpu-parameters")
CASES: list[tuple[Mesh, tuple[str, ...]]] = [
    (Mesh(data=4, expert=2), FOUR),
    (Mesh(data=4, expert=2), ("--zero-stage", "1", *ONE)),
    (Mesh(data=4, expert=2), ("--zero-stage", "2", *FOUR)),
    (Mesh(data=4, expert=2), ("--zero-stage", "2", *ONE)),
    (Mesh(data=4, expert=2), ("--zero-stage", "3", *VARIANTS["full recompute"], *FOUR)),
    (Mesh(data=4, expert=4), ("--zero-stage", "2")),
    (Mesh(data=4, expert=4), ("--zero-stage", "3", *ONE)),
    (Mesh(data=4, expert=4), ("--zero-stage", "1", *VARIANTS["CPU optimizer 0.6"], *FOUR)),
    (Mesh(data=4, expert=2), ("--zero-stage", "2", *VARIANTS["CPU optimizer 0.05"])),
    (Mesh(data=4, expert=2), ("--zero-stage", "3", *VARIANTS["CPU optimizer 0.6"], *FOUR)),
    (Mesh(data=4, expert=4), ("--zero-stage", "3", *OFFLOADED)),
    (Mesh(data=4, expert=2), ("--zero-stage", "0", *VARIANTS["all on the CPU"], *ONE)),
    (Mesh(data=2, tensor=2, expert=2), ("--zero-stage", "1")),
    (Mesh(data=2, tensor=2, expert=2), ("--zero-stage", "3", *VARIANTS["CPU optimizer 0.6"])),
    (Mesh(data=2, pipeline=2, expert=2), ("--zero-stage", "2")),
    (Mesh(data=4), ("--zero-stage", "3", *FOUR)),
]
MUON = ("--optimizer", "muon")
MUON_CASES: list[tuple[Mesh, tuple[str, ...]]] = [
    (Mesh(data=4, expert=2), ("--zero-stage", "1", *MUON, *ONE)),
    (Mesh(data=4, expert=2), ("--zero-stage", "3", *MUON, *VARIANTS["CPU optimizer 0.6"], *FOUR)),
    (Mesh(data=4, expert=4), ("--zero-stage", "2", *MUON)),
    (Mesh(data=2, tensor=2, expert=2), ("--zero-stage", "3", *MUON, *VARIANTS["CPU optimizer 0.6"])),
    (Mesh(data=2, pipeline=2, expert=2), ("--zero-stage", "2", *MUON)),
]
"""An expert's matrices are whole on each expert rank; others are assembled over all data ranks."""


class ExpertsBlock(Block):
    """A block, and a sum over the outputs of each token's two best experts; each expert rank has some of the experts.

    The experts' inner width is split over the tensor axis.
    """

    def __init__(self, config: ModelConfig, axis: TensorAxis = ALONE, *, topology: Topology, **kwargs: Any):
        super().__init__(config, axis, **kwargs)
        assert config.hidden_size
        self.placed, self.tensor = ExpertAxis.of(topology), axis
        experts, own = self.placed.split(NUM_EXPERTS), NUM_EXPERTS // self.placed.size
        self.declared = {
            "router": ParameterSpec(Normal(1.0), REPLICATED),
            "up": ParameterSpec(Normal(0.5), experts | axis.split(1, WIDTH)),
            "down": ParameterSpec(Normal(0.5), experts | axis.split(2, WIDTH)),
        }
        width, hidden = WIDTH // axis.size, config.hidden_size
        self.router = nn.Parameter(torch.empty(NUM_EXPERTS, hidden))
        self.up = nn.Parameter(torch.empty(own, width, hidden))
        self.down = nn.Parameter(torch.empty(own, hidden, width))

    def forward(self, x_ND: torch.Tensor, *fields: Any) -> torch.Tensor:
        y_ND = super().forward(x_ND, *fields)
        weight_NK, chosen_NK = (y_ND @ self.router.t()).softmax(-1).topk(TOP_K, -1)
        if self.placed.size > 1:
            return y_ND + on_their_ranks(y_ND, weight_NK, chosen_NK, NUM_EXPERTS, self.placed, self.experts)
        return y_ND + self.experts(y_ND, weight_NK, places_of(chosen_NK, NUM_EXPERTS))

    def experts(self, x_ND: torch.Tensor, weight_NK: torch.Tensor, places: Places) -> torch.Tensor:
        x_MD = scattered(copy_to(x_ND, self.tensor) if self.tensor.size > 1 else x_ND, places)
        parts = zip(x_MD[: places.counts_E.sum()].split(places.counts_E.tolist()), self.up, self.down, strict=True)
        y_MD = torch.cat([F.gelu(part @ up.t()) @ down.t() for part, up, down in parts])
        y_MD = F.pad(y_MD, (0, 0, 0, len(x_MD) - len(y_MD)))
        return combined(sum_over(y_MD, self.tensor) if self.tensor.size > 1 else y_MD, weight_NK, places)


def described(topology: Topology, config: ModelConfig, axis: TensorAxis = ALONE, **kwargs: Any) -> ModelSpec:
    """A GPT whose every other block has experts; the first of them is called again as the fifth block."""

    def changed(number: int, layer: ModelLayer) -> ModelLayer:
        if layer.role is not Role.BLOCK or number % 2:
            return layer
        old, kwargs = layer.spec, {**layer.spec.kwargs, "topology": topology}
        fields = old.batch_fields
        spec = LayerSpec(ExpertsBlock, *old.args, name=old.name, batch_fields=fields, **kwargs)
        if old.name in ("layers.0", "layers.4"):
            spec = TiedLayerSpec("shared", ExpertsBlock, *first.args, name=first.name, batch_fields=fields, **kwargs)
        return ModelLayer(layer.role, spec)

    layers = gpt.gpt_model(config, axis, **kwargs).layers
    first = next(layer.spec for layer in layers if layer.role is Role.BLOCK)
    return ModelSpec(tuple(changed(number, layer) for number, layer in enumerate(layers)), config.seq_length)


def trained(
    mesh: Mesh, flags: tuple[str, ...], topology: Topology, *, save_in: Path, resume_from: Path | None
) -> Outcome:
    """Two steps, a save, and one step after a resume from another layout's save."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_engine, "gpt_model", partial(described, topology))
        # The experts are this test's: the flags of the model's own know none.
        config = case_config(WORDS, case(replace(mesh, expert=1), *flags), mesh.world_size)
        run = CaseRun(config, topology)
        run.train(0, STEPS)
        run.save(save_in, STEPS)
        if resume_from:
            run.resume(resume_from)
        run.train(STEPS, STEPS + 1)
        run.trainer.close()
        return run.outcome


def run_all(rank: int, folder: Path, cases: list[tuple[Mesh, tuple[str, ...]]]) -> list[Outcome]:
    topologies: dict[Mesh, Topology] = {}
    outcomes = []
    for number, (mesh, flags) in enumerate(cases):
        if mesh not in topologies:
            topologies[mesh] = make_topology(mesh, rank, torch.device("cpu"))
        here, before = folder / str(number + 1), folder / str(number)
        outcomes.append(trained(mesh, flags, topologies[mesh], save_in=here, resume_from=before))
    return outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[Outcome]]:
    folder = tmp_path_factory.mktemp("experts")
    topology = Topology(Mesh(), 0, torch.device("cpu"))
    alone = trained(Mesh(), (), topology, save_in=folder / "0", resume_from=None)
    return alone, spawn(run_all, 4, folder, CASES, timeout_s=400.0)[0]


def test_muon_in_each_layout_equals_one_process(tmp_path: Path) -> None:
    topology = Topology(Mesh(), 0, torch.device("cpu"))
    alone = trained(Mesh(), MUON, topology, save_in=tmp_path / "0", resume_from=None)
    found = spawn(run_all, 4, tmp_path, MUON_CASES, timeout_s=400.0)[0]
    apart = [difference(zip(one.weights, alone.weights, strict=True)) for one in found]
    assert max(apart) <= TOLERANCE, apart


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c.describe()} {' '.join(flags)}" for c, flags in CASES])
def test_layout_equals_one_process(outcomes: tuple[Outcome, list[Outcome]], number: int) -> None:
    """Initial weights bit for bit; losses, norms, gradients and weights of each step, the last after a resume."""
    alone, found = outcomes[0], outcomes[1][number]
    assert {name for name in alone.initial if "router" in name} == {"layers.0.router", "layers.2.router"}
    assert alone.steps[0][1] > 0.05  # it clips
    assert difference([(found.initial, alone.initial)]) == 0
    assert len(found.steps) == STEPS + 1
    assert step_difference(found.steps, alone.steps) <= TOLERANCE
    assert difference(zip(found.gradients, alone.gradients, strict=True)) <= TOLERANCE
    assert difference(zip(found.weights, alone.weights, strict=True)) <= TOLERANCE
