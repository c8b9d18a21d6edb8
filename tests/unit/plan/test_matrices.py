"""What Muon costs: figures known from elsewhere, and the memory of the run itself."""

from __future__ import annotations

import pytest

from gptpar.engine.ranges import Home
from gptpar.plan.job import Job
from gptpar.plan.matrices import flops_of_step
from gptpar.plan.report import plan_json, plan_text
from gptpar.topology.mesh import Mesh
from tests.helpers import make_trainer, tiny_config
from tests.unit.plan.plans import plan

MODEL = "--preset 1.3B --vocab-size 50304 --seq-length 2048 --micro-batch-size 4 --bf16 --gpu h100 --world-size 1"
MUON = "--optimizer muon"


@pytest.mark.parametrize(("samples", "share"), [(128, 2.8), (8, 44.6)])
def test_the_share_of_a_step_falls_with_the_batch(samples: int, share: float) -> None:
    """62 TFLOP at 1.3 billion parameters, whatever the batch."""
    planned = plan(f"{MODEL} --global-batch-size {samples} {MUON}")
    assert flops_of_step(planned.job) == pytest.approx(61.8e12, rel=1e-3)
    assert "61.8 TFLOP a step" in plan_text(planned, []) and f"({share} % of the model's" in plan_text(planned, [])
    with_adam = plan(f"{MODEL} --global-batch-size {samples}")
    assert plan_json(with_adam)["ms"]["matrices"] == 0 and "TFLOP a step" not in plan_text(with_adam, [])
    assert plan_json(planned)["ms"]["matrices"] == pytest.approx(1e3 * planned.time.matrices, abs=1e-3)
    assert planned.time.total - with_adam.time.total == pytest.approx(planned.time.matrices, rel=0.1)


def test_processes_that_share_matrices_share_their_products() -> None:
    flags = f"{MODEL.replace('--world-size 1', '')} --global-batch-size 128 {MUON}"
    alone = plan(f"{flags} --world-size 1").time.matrices
    sharing = plan(f"{flags} --world-size 2 --zero-stage 1").time.matrices
    copies = plan(f"{flags} --world-size 2 --zero-stage 0").time.matrices
    assert copies == alone and 0.5 * alone < sharing < 0.8 * alone


@pytest.mark.parametrize("ratio", [0, 0.3, 1])
def test_states_take_what_the_run_gives_them(ratio: float) -> None:
    offload = f"--no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio {ratio}" if ratio else ""
    config = tiny_config(f"{MUON} {offload}")
    trainer, job = make_trainer(config), Job(config, Mesh(), "cpu")
    vectors = trainer.engine.optimizer.vectors
    assert job.device_state_bytes(job.stages[0]) == sum(vector.nbytes for vector in vectors.values())
    on_host = 0 if trainer.host is None else trainer.host.state_bytes[0]
    assert job.host_state(job.stages[0]).num_bytes == on_host
    whole = Job(tiny_config(offload), Mesh(), "cpu")
    matrices = sum(one.length for one in trainer.engine.table.ranges(home=Home.DEVICE) if one.group >= 2)
    saved = whole.device_state_bytes(whole.stages[0]) - job.device_state_bytes(job.stages[0])
    assert saved == pytest.approx(4 * matrices, abs=4 * 64 * 20)
    trainer.close()
