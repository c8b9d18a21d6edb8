"""Experts compute one process's numbers in every layout: losses, gradients, weights, bias and counts."""

from dataclasses import replace
from pathlib import Path

import pytest

from gptpar.cli.check_layouts import SMALL
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.config import Config
from gptpar.model.experts import dispatch
from gptpar.model.experts.dispatch import RowLimit
from gptpar.model.experts.layer import Experts
from gptpar.run import trainer
from gptpar.topology.groups import Topology
from tests.ranks.layout_cases import Family, Pools, assert_equals_one_process, at, run_alone

NUM_EXPERTS, TOPK = 8, 2
SIZES = "--global-batch-size 8 --micro-batch-size 2 --num-layers 4"
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
SPLIT_TOKENS, TWO_STAGES = "--sequence-parallel", "--num-virtual-stages-per-pipeline-rank 2"
FOURS = "--micro-batch-size 4"
"""With the default of 2, each process has two micro-batches in a step, or nearly so, however many share the samples."""
CASES = {
    "sigmoid": [
        at("dp2 cp2 ep4", "--zero-stage 2"),
        at("cp4", f"--zero-stage 3 {FOURS}", "full recompute"),
        at("dp2 tp2", f"--zero-stage 2 {SPLIT_TOKENS}", "selective"),
        at("tp2 pp2", f"{TWO_STAGES} {FOURS}", "CPU optimizer 0.6"),
        at("dp4 ep2", "--zero-stage 3 --micro-batch-size 1", "CPU optimizer 0.6"),
        at("tp2 cp2 ep2", f"--cp-comm-type allgather --zero-stage 2 {SPLIT_TOKENS} {FOURS}"),
        at("dp2 pp2 ep2", f"--zero-stage 1 {TWO_STAGES}", "full recompute"),
    ],
    "softmax": [
        at("dp4 ep4", "--zero-stage 3 --cpu-parameters --micro-batch-size 1", "all on the CPU"),
        at("dp2 pp2", "--zero-stage 1", "all on the CPU"),
        at("tp4", FOURS, "every 2"),
        at("dp4 ep2", "--zero-stage 0", "all on the CPU"),
        at("tp2 cp2 ep2", f"--cp-comm-type allgather --zero-stage 2 {SPLIT_TOKENS} {FOURS}"),
        at("dp2 tp2 ep2", "--zero-stage 3 --micro-batch-size 1", "selective"),
    ],
    "muon, full experts": [
        at("dp2 tp2 ep2", "--zero-stage 3"),
        at("dp2 cp2 ep4", "--zero-stage 3 --cp-comm-type allgather --micro-batch-size 1"),
        at("cp4", FOURS, "full recompute"),
    ],
}


class ExtremeLoads(CaseRun):
    """All tokens choose expert 0 and none chooses expert 1, where the model has a bias that says so."""

    def __init__(self, config: Config, topology: Topology):
        super().__init__(config, topology)
        state = self.trainer.experts.state()
        assert state is not None
        if config.model.moe_router_enable_expert_bias:
            state["bias"] = [[10.0, -10.0, *[0.0] * (NUM_EXPERTS - 2)] for _ in state["bias"]]
            self.trainer.experts.load(state)


class LimitedRows(ExtremeLoads):
    """As a recorded step's, but for the recording: with ZeRO no limit holds, without it none is exceeded."""

    def __init__(self, config: Config, topology: Topology):
        super().__init__(config, topology)
        self.trainer._limit = limit = RowLimit(topology.device)
        self.exceeds = config.parallel.zero_stage > 0
        dispatch.LIMIT, trainer.MAX_NET_REDONE = 1.25 if self.exceeds else 2.0, 2
        for stage in self.trainer.pipeline.stages_here:
            for module in stage.modules():
                if isinstance(module, Experts) and module.placed.size > 1:
                    module.placed = replace(module.placed, limit=limit)

    def train(self, first: int, last: int) -> None:
        super().train(first, last)
        is_alone = self.topology.mesh.world_size == 1
        assert self.trainer.steps_done_again == (last if self.exceeds and not is_alone else 0)
        assert self.trainer.limits_rows == (not self.exceeds or is_alone or last < trainer.MAX_NET_REDONE)


def family(name: str, model: str, *more: str) -> Family:
    words = [*SMALL.split(), *SIZES.split(), *EXPERTS.split(), *MODELS[model].split(), "--fp64", *more]
    return Family(words, CASES[name], ExtremeLoads)


@pytest.mark.parametrize("model", MODELS)
def test_layouts_equal_one_process(model: str, tmp_path: Path, ranks: Pools) -> None:
    """Also after a resume from the layout before, of another micro-batch."""
    alone = assert_equals_one_process(family(model, model), tmp_path, ranks)
    counts_LE = alone.weights[-1]["choices of experts"]
    tokens = 8 * 16
    assert counts_LE.sum(1).tolist() == [tokens * TOPK] * len(counts_LE)
    if model == "sigmoid":
        assert counts_LE[:, 0].tolist() == [tokens] * 3 and counts_LE[:, 1].tolist() == [0] * 3
        assert len(alone.steps[0]) == 2 + 3  # both losses of experts, and the fullest expert
        assert alone.steps[0][-1] == pytest.approx(NUM_EXPERTS / TOPK)


def test_muon_updates_each_expert_s_matrices_and_full_experts_drop_the_same_tokens(
    tmp_path: Path, ranks: Pools
) -> None:
    more = ("--optimizer", "muon", "--moe-expert-capacity-factor", "0.75", "--moe-router-topk", "6")
    assert_equals_one_process(family("muon, full experts", "softmax", *more), tmp_path, ranks)


def test_a_step_with_more_rows_than_fit_is_done_again(tmp_path: Path, ranks: Pools) -> None:
    """After two of two, the limit is given up."""
    cases = [at("dp2 ep2", "--zero-stage 1"), at("dp2 ep2", "--zero-stage 0", "full recompute")]
    assert_equals_one_process(replace(family("sigmoid", "sigmoid"), cases=cases, kind=LimitedRows), tmp_path, ranks)


def test_a_step_that_is_skipped_moves_no_bias() -> None:
    """With a loss scale that overflows fp16, neither weights nor bias nor counts change."""
    words = [word for word in family("sigmoid", "sigmoid").words if word != "--fp64"]
    run = run_alone(Family([*words, "--fp16", "--initial-loss-scale", "1e30"], ()))
    run.train(0, 1)
    assert run.outcome.steps[0][1] != run.outcome.steps[0][1]  # no norm: it was skipped
    after = run.trainer.experts.tensors()
    assert not after["expert bias"].any() and not after["choices of experts"].any()
    run.trainer.loss_scale.load({**run.trainer.loss_scale.state(), "value": 1.0})
    run.train(1, 2)
    after = run.trainer.experts.tensors()
    assert (
        after["expert bias"].abs().max() == pytest.approx(0.01)
        and after["choices of experts"].sum() == 3 * 8 * 16 * TOPK
    )
