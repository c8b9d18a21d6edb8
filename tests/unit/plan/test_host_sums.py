"""Plans of runs whose gradients are summed over micro-batches in host memory."""

from __future__ import annotations

import pytest

from gptpar.offload.copying_transfers import MAX_UNITS_WAITING
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.offload.host_sums import sums_bytes
from gptpar.plan.report import plan_text
from tests.unit.plan.plans import OFFLOAD, TEN_B, plan


def test_sums_on_the_host_leave_the_device_and_take_time_where_the_host_is_slow() -> None:
    """Of 10B, 4 bytes an element leave the GPU; a micro-batch's addition moves 12 bytes an element at 150 GB/s."""
    flags = f"{TEN_B} {OFFLOAD} 1 --gpu-memory 80 --host-memory 512 --global-batch-size "
    stay, leave = (plan(f"{flags} 160 --offload-gradients {word}") for word in ("off", "on"))
    (device_stay,), (device_leave,) = stay.memory, leave.memory
    table = stay.job.table(stay.job.stages[0])
    elements, longest = table.length(), max(unit.length for unit in table.units)
    assert device_stay.gradients == 4 * (elements + stay.job.early_elements) and not leave.job.early_elements
    assert device_leave.gradients == 2 * (MAX_UNITS_WAITING + 1) * longest
    assert device_leave.host - device_stay.host == sums_bytes(elements, 4, 2) - RING_BYTES - 2 * stay.job.early_elements
    count = stay.job.num_micro_batches
    assert count > 1 and leave.job.offloaded_gradient_size == 2 and stay.job.offloaded_gradient_size == 4
    each, compute = 12 * elements / 150e9, leave.time.compute / count
    assert leave.time.cpu_optimizer > (count - 1) * max(0.0, each - compute)
    text = " ".join(plan_text(leave, []).split())
    assert "gradients leave the GPU at once, and those of 100 % of the layers are added up on the host" in text


def test_gradients_of_layers_whose_sums_stay_are_added_on_the_device() -> None:
    flags = f"{TEN_B} {OFFLOAD} 1 --gpu-memory 200 --host-memory 512 --global-batch-size 160 --offload-gradients"
    words = ("off", "on --offload-gradients-ratio 0.5", "on")
    stay, half, leave = (plan(f"{flags} {word}").time.compute for word in words)
    assert leave < half < stay and half == pytest.approx((stay + leave) / 2)
