"""Plans of runs whose blocks save for the backward pass in host memory: bytes on both sides, and the bus."""

from __future__ import annotations

import pytest

from gptpar.plan.hardware import SUSTAINED
from tests.unit.plan.plans import CALM, SMALL, plan
from tests.unit.plan.test_predictions import block_bytes


@pytest.mark.parametrize(("count", "stages"), [(3, 1), (2, 2)])
def test_what_blocks_save_on_the_host(count: int, stages: int) -> None:
    """Four blocks; the device holds what one of them saves while it runs, and what another one does on its way."""
    flags = f"{SMALL}--micro-batch-size 2 --global-batch-size 8 --pipeline-model-parallel-size {stages}"
    flags += f" --world-size {stages} --recompute-granularity selective --recompute-modules layernorm mlp"
    assert plan(flags).job.graph and not plan(f"{flags} --cpu-offloading-num-layers 1").job.graph
    flags += " --cuda-graph off"
    kept, offloaded = plan(flags), plan(f"{flags} --cpu-offloading-num-layers {count}")
    block = 2 * 32 * block_bytes(kept.job)
    for stage in range(stages):  # the first of two stages holds two micro-batches
        before, after, leaving = kept.memory[stage], offloaded.memory[stage], count / stages * (stages - stage)
        assert after.activations == before.activations - leaving * block
        assert after.host == before.host + leaving * block
        assert after.buffers == before.buffers + (1 + stages) * block


def test_activations_and_weights_share_the_bus() -> None:
    """Copies of 32 blocks take longer than the forward pass, not longer than the backward pass."""
    flags = f"{CALM} --preset 6.7B --seq-length 1024 --micro-batch-size 16 --global-batch-size 128 --gpu-memory 140"
    flags += " --recompute-granularity selective --recompute-modules layernorm mlp --cpu-offloading-num-layers"
    none, most, every = (plan(f"{flags} {count}") for count in (0, 28, 32))
    block = 16 * 1024 * block_bytes(every.job)
    assert block == 16 * 1024 * (12 * 4096 + 4 * 32)
    assert none.time.bus == 0 and most.time.bus > 0
    assert every.time.bus - most.time.bus == pytest.approx(8 * 4 * block / SUSTAINED.bus)
    forward = every.time.stages[0].forward
    assert every.time.bus > 8 * (32 * block / SUSTAINED.bus - forward)
    weights = plan(f"{flags} 32 --cpu-optimizer --cpu-parameters")
    assert weights.time.bus > every.time.bus
    assert every.floors.bus == pytest.approx(8 * 32 * 2 * block / 89e9)
    coming = 8 * (32 * block + 2 * 2 * every.job.num_parameters)
    assert weights.floors.bus == pytest.approx(coming / 55e9, rel=1e-3)
