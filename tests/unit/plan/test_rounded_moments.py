"""Rounded moments in plans: bytes on the GPU and on the host as a run allocates them, and fewer bytes for the CPU."""

from __future__ import annotations

import pytest

from gptpar.engine.ranges import Home
from gptpar.optim.adamw import ADAMW, adamw_with
from gptpar.plan.host_updates import speed_of
from gptpar.plan.planner import Plan
from tests.helpers import make_trainer, tiny_config
from tests.unit.plan.plans import OFFLOAD, SMALL, plan

BOTH = " --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"


def states(planned: Plan) -> tuple[int, int]:
    """Bytes of master weights and moments on the GPU and on the host."""
    job = planned.job
    return job.device_state_bytes(job.stages[0]), job.host_state(job.stages[0]).num_bytes


@pytest.mark.parametrize(
    ("more", "saved"),
    [(" --exp-avg-dtype bf16", 2), (" --exp-avg-sq-dtype bf16", 2), (BOTH, 4), (BOTH.replace("bf16", "fp8"), 6)],
)
def test_each_rounded_moment_saves_bytes_of_memory_and_twice_as_many_of_an_update(more: str, saved: int) -> None:
    exact, rounded = (plan(f"{SMALL}--micro-batch-size 2 {OFFLOAD}0.6 {flags}") for flags in ("", more))
    table = exact.job.table(exact.job.stages[0])
    here, there = (was - now for was, now in zip(states(exact), states(rounded), strict=True))
    assert here == saved * table.length(Home.DEVICE) and there == saved * table.length(Home.HOST)
    speeds = [speed_of(one.job, one.cluster) for one in (exact, rounded)]
    gradient = exact.job.offloaded_gradient_size
    assert speeds[1].update / speeds[0].update == pytest.approx((26 + gradient - 2 * saved) / (26 + gradient))


def test_a_run_allocates_what_the_update_says() -> None:
    assert adamw_with("fp32", "fp32") is ADAMW and ADAMW.state_bytes(4) == 12 and ADAMW.state_bytes(8) == 24
    for name, sizes in (("bf16", (8, 12)), ("fp8", (6, 10))):
        both = adamw_with(name, name)
        assert (both.state_bytes(4), both.state_bytes(8)) == sizes
    for words, size in (("", 12), ("--exp-avg-sq-dtype bf16", 10), (BOTH, 8), (BOTH.replace("bf16", "fp8"), 6)):
        trainer = make_trainer(
            tiny_config(f"--cpu-optimizer --cpu-optimizer-ratio 0.5 --offload-speculation on {words}")
        )
        offloaded = trainer.engine.table.length(Home.HOST)
        assert trainer.host is not None and trainer.host.state_bytes == (size * offloaded, size * offloaded)
        vectors = trainer.engine.optimizer.vectors.values()
        assert sum(one.nbytes for one in vectors) == size * trainer.engine.table.length(Home.DEVICE)
        trainer.close()
