"""The memory mirror in a plan: bytes of a machine's memory, and seconds of a step."""

from __future__ import annotations

import pytest

from gptpar.cli.plan import make_planner
from gptpar.plan.report import plan_json
from tests.unit.plan.plans import GIB, SMALL, plan

BATCH = "--micro-batch-size 1 --global-batch-size 32 --zero-stage 1 "
STATE = 12
"""Bytes of an element's fp32 master weight and its two moments."""


def test_a_machine_alone_keeps_two_copies_of_its_own_state() -> None:
    without, found = (plan(SMALL + BATCH + f"--world-size 4 {flag}") for flag in ("", "--mirror-interval 20"))
    cost, state = found.mirror, STATE * found.job.num_parameters
    assert without.mirror is None and cost is not None
    assert cost.process == pytest.approx(state / 4, rel=0.01) and cost.machine == pytest.approx(2 * state, rel=0.01)
    assert found.host_need - without.host_need == cost.machine
    assert cost.step_s == pytest.approx(cost.process / 48e9 / 20) and cost.sent_s == 0
    assert plan_json(without)["mirror"] is None and plan_json(found)["mirror"]["s_to_the_neighbour"] == 0


def test_each_of_several_machines_keeps_its_neighbours_files_too() -> None:
    flags = SMALL + BATCH + "--world-size 32 --gpus-per-node 8 --pipeline-model-parallel-size 2 --mirror-interval 5"
    found = plan(flags)
    cost, job = found.mirror, found.job
    assert cost is not None
    stages = [STATE * sum(unit.length for unit in job.table(part).units) for part in job.stages]
    # Machines 0 and 1 hold the first stage, 2 and 3 the second one; with a tied embedding both stages have it.
    assert cost.process == max(stages) / 16
    assert cost.machine == pytest.approx(2 * 8 * (2 * max(stages)) / 16)
    assert cost.sent_s == cost.process / 1.1e9


def test_copies_that_a_machine_cannot_hold_do_not_fit() -> None:
    flags = "--preset 1.3B --bf16 --vocab-size 50257 --micro-batch-size 4 --global-batch-size 64 --world-size 4 "
    flags += "--zero-stage 1 --host-memory 40"
    assert plan(flags).fits
    found, _ = make_planner(f"{flags} --mirror-interval 20".split())
    assert not found.plan().fits and found.plan().host_need / GIB == pytest.approx(41.4, abs=0.1)
    assert "need 41.41 GiB of host memory and it has 40.00 GiB" in found.plan().shortage()
