"""A model of two kinds of blocks: MFU, the division into stages, memory and time add up what each block says."""

import pytest

from gptpar.plan.planner import Plan
from tests.unit.plan.plans import CALM, OFFLOAD, plan

H, WIDTH, EXPERTS = 512, 2048, 4
"""Model width, width of an MLP, and experts of that width in a mixture; a token uses them all."""
FLAGS = CALM + (
    f"--num-layers 6 --hidden-size {H} --num-attention-heads 4 --seq-length 256 --vocab-size 128 --micro-batch-size 2 "
    f"--ffn-hidden-size {WIDTH} --disable-bias-linear "
)
WIDE = FLAGS + f"--num-experts {EXPERTS} --moe-router-topk {EXPERTS} "
MIXED = WIDE + "--moe-layer-freq [1,1,0,0,0,0] "
PIPED = "--world-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8 --pipeline-partition-method "


def plans(flags: str = "") -> tuple[Plan, Plan, Plan]:
    """Of the model whose first two blocks are mixtures, of one without mixtures, and of mixtures alone."""
    return plan(MIXED + flags), plan(FLAGS + flags), plan(WIDE + flags)


@pytest.mark.parametrize(
    "flags", ["--recompute-granularity selective --recompute-modules mlp ", OFFLOAD + "0.5 --cuda-graph off"]
)
def test_memory_and_time_are_sums_over_blocks(flags: str) -> None:
    found, narrow, wide = plans(flags)
    for kind in ("parameters", "optimizer", "host"):
        few, many, here = (getattr(one.memory[0], kind) for one in (narrow, wide, found))
        assert here == pytest.approx(few + (many - few) * 2 / 6, rel=1e-6)
    assert found.memory[0].buffers == wide.memory[0].buffers > narrow.memory[0].buffers  # of the block that needs most
    for kind in ("forward", "backward"):
        few, many, here = (getattr(one.time.stages[0], kind) for one in (narrow, wide, found))
        assert here == pytest.approx(few + (many - few) * 2 / 6, rel=1e-9) and few < here < many
    kept = [one.job.kept(2) for one in (wide, narrow)]
    assert [found.job.kept(number) for number in found.job.blocks(found.job.stages[0])] == kept[:1] * 2 + kept[1:] * 4


def test_the_utilisation_counts_each_block() -> None:
    found, narrow, _ = plans()
    more = 2 * (2 * H * WIDTH * (EXPERTS - 1) + H * EXPERTS)  # weights, those of the routers among them
    assert found.job.num_parameters - narrow.job.num_parameters == more
    assert found.job.flops_per_token - narrow.job.flops_per_token == 3 * 2 * more
    ratio = found.job.flops_per_token / narrow.job.flops_per_token * narrow.time.total / found.time.total
    assert found.utilisation / narrow.utilisation == pytest.approx(ratio, rel=1e-12)


@pytest.mark.parametrize("method", ["flops", "parameters"])
def test_stages_are_even_in_what_they_compute(method: str) -> None:
    """Mixtures are three times as much as other blocks: two of them face four."""
    found, narrow, _ = plans(PIPED + method)
    assert narrow.job.split.layers_of(0) == [0, 1, 2, 3, 4]
    assert found.job.split.layers_of(0) == [0, 1, 2, 3]
    assert [len(found.job.blocks(part)) for part in found.job.stages] == [2, 4]
