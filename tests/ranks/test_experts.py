"""Experts compute one process's numbers in every layout: losses, gradients, weights, bias and counts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.cli.check_layouts import SMALL, case_config
from gptpar.cli.check_layouts.compare import difference, step_difference
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config import Config
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.ranks.layout_cases import ALONE, TOLERANCE, VARIANTS, chained_outcomes
from tests.spawn import spawn

NUM_EXPERTS, TOPK, SAVED, STEPS = 8, 2, 2, 3
SIZES = "--global-batch-size 16 --micro-batch-size 2 --num-layers 4"
EXPERTS = (
    "--position-embedding-type rope --normalization RMSNorm "
    f"--num-experts {NUM_EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size 20 --moe-z-loss-coeff 0.01 "
    "--moe-aux-loss-coeff 0.1 "
)
SIGMOID = (
    "--swiglu --disable-bias-linear --moe-router-load-balancing-type seq_aux_loss "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01 "
    "--moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate "
    "--moe-layer-freq [0]*1+[1]*3 --moe-router-num-groups 4 --moe-router-group-topk 2"
)
SOFTMAX = (
    "--moe-router-load-balancing-type global_aux_loss --moe-router-pre-softmax --moe-layer-freq 2 --quick-geglu "
    "--activation-func-clamp-value 0.1 --glu-linear-offset 1 --softmax-type learnable --window-size 5 "
    "--window-pattern SF"
)
MODELS = {"sigmoid": SIGMOID, "softmax": SOFTMAX}
EP2, EP4 = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
TWO_STAGES = "--num-virtual-stages-per-pipeline-rank 2"
CASES = [
    (Mesh(data=2, context=2, expert=4), f"{EP4} {CP2} --zero-stage 2 --micro-batch-size 4"),
    (Mesh(context=4), f"{CP4} --zero-stage 3 --micro-batch-size 1 {' '.join(VARIANTS['full recompute'])}"),
    (Mesh(data=2, tensor=2), f"--zero-stage 2 --sequence-parallel {' '.join(VARIANTS['selective'])}"),
    (Mesh(tensor=2, pipeline=2), f"{TWO_STAGES} {' '.join(VARIANTS['CPU optimizer 0.6'])}"),
    (Mesh(data=2, pipeline=2), f"--zero-stage 1 --micro-batch-size 4 {' '.join(VARIANTS['all on the CPU'])}"),
    (Mesh(tensor=4), " ".join(VARIANTS["every 2"])),
    (Mesh(data=4, expert=2), f"{EP2} --zero-stage 3 --micro-batch-size 1 {' '.join(VARIANTS['CPU optimizer 0.6'])}"),
    (Mesh(tensor=2, context=2, expert=2), f"{EP2} {CP2} --cp-comm-type allgather --zero-stage 2 --sequence-parallel"),
    (Mesh(data=2, pipeline=2, expert=2), f"{EP2} --zero-stage 1 {TWO_STAGES} {' '.join(VARIANTS['full recompute'])}"),
    (Mesh(data=2, tensor=2, expert=2), f"{EP2} --zero-stage 3 --optimizer muon"),
]


class ExtremeLoads(CaseRun):
    """All tokens choose expert 0 and none chooses expert 1, where the model has a bias that says so."""

    def __init__(self, config: Config, topology: Topology):
        super().__init__(config, topology)
        state = self.trainer.experts.state()
        assert state is not None
        if config.model.moe_router_enable_expert_bias:
            state["bias"] = [[10.0, -10.0, *[0.0] * (NUM_EXPERTS - 2)] for _ in state["bias"]]
            self.trainer.experts.load(state)


def words_of(model: str) -> list[str]:
    return [*SMALL.split(), *SIZES.split(), *EXPERTS.split(), *MODELS[model].split(), "--fp64"]


def run_alone(words: list[str]) -> Outcome:
    run = ExtremeLoads(case_config(words, ALONE, 1), Topology(Mesh(), 0, torch.device("cpu")))
    run.train(0, STEPS)
    run.trainer.close()
    return run.outcome


@pytest.mark.parametrize("model", MODELS)
def test_layouts_equal_one_process(model: str, tmp_path: Path) -> None:
    """Also after a resume from the layout before, of another micro-batch."""
    how: dict[str, Any] = {"saved": SAVED, "steps": STEPS, "kind": ExtremeLoads}
    elementwise = [one for one in CASES if "muon" not in one[1]]
    found = spawn(partial(chained_outcomes, **how), 4, tmp_path, elementwise, words_of(model), timeout_s=300.0)[0]
    alone = run_alone(words_of(model))
    counts_LE = alone.weights[-1]["choices of experts"]
    tokens = 16 * 16
    assert counts_LE.sum(1).tolist() == [tokens * TOPK] * len(counts_LE)
    if model == "sigmoid":
        assert counts_LE[:, 0].tolist() == [tokens] * 3 and counts_LE[:, 1].tolist() == [0] * 3
        assert len(alone.steps[0]) == 2 + 3  # both losses of experts, and the fullest expert
        assert alone.steps[0][-1] == pytest.approx(NUM_EXPERTS / TOPK)
    for (mesh, flags), outcome in zip(elementwise, found, strict=True):
        named = f"{mesh.describe()} {flags}"
        assert difference([(outcome.initial, alone.initial)]) == 0, named
        assert step_difference(outcome.steps, alone.steps) <= TOLERANCE, named
        assert difference(zip(outcome.gradients, alone.gradients, strict=True)) <= TOLERANCE, named
        assert difference(zip(outcome.weights, alone.weights, strict=True)) <= TOLERANCE, named
        for one, other in zip(outcome.weights, alone.weights, strict=True):
            for name in ("expert bias", "choices of experts"):
                assert torch.equal(one[name], other[name]), f"{named}: {name}"


def test_muon_updates_each_expert_s_matrices_and_full_experts_drop_the_same_tokens(tmp_path: Path) -> None:
    words = [*words_of("softmax"), *["--optimizer", "muon", "--moe-expert-capacity-factor", "0.75"]]
    ((mesh, flags),) = (one for one in CASES if "muon" in one[1])
    cases = [
        (mesh, flags),
        (Mesh(data=2, context=2, expert=2), f"{flags} {CP2} --cp-comm-type allgather --micro-batch-size 1"),
        (Mesh(context=4), f"{CP4} --optimizer muon {' '.join(VARIANTS['full recompute'])}"),
    ]
    how: dict[str, Any] = {"saved": SAVED, "steps": STEPS, "kind": ExtremeLoads}
    found = spawn(partial(chained_outcomes, **how), 4, tmp_path, cases, words, timeout_s=300.0)[0]
    alone = run_alone(words)
    for outcome in found:
        assert difference(zip(outcome.weights, alone.weights, strict=True)) <= TOLERANCE


def test_a_step_that_is_skipped_moves_no_bias() -> None:
    """With a loss scale that overflows fp16, neither weights nor bias nor counts change."""
    words = [*(word for word in words_of("sigmoid") if word != "--fp64"), "--fp16", "--initial-loss-scale", "1e30"]
    run = CaseRun(case_config(words, ALONE, 1), Topology(Mesh(), 0, torch.device("cpu")))
    run.train(0, 1)
    assert run.outcome.steps[0][1] != run.outcome.steps[0][1]  # no norm: it was skipped
    after = run.trainer.experts.tensors()
    assert not after["expert bias"].any() and not after["choices of experts"].any()
    run.trainer.loss_scale.load({**run.trainer.loss_scale.state(), "value": 1.0})
    run.train(1, 2)
    after = run.trainer.experts.tensors()
    assert after["expert bias"].abs().max() == pytest.approx(0.01) and after["choices of experts"].sum() == 3 * 512
