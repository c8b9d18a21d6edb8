"""Plans of runs whose optimizer or parameters live in host memory, against hand counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gptpar.errors import GptparError
from gptpar.optim.transfers import RING_BYTES
from gptpar.plan.hardware import SUSTAINED
from gptpar.plan.main import make_planner
from gptpar.topology import Layout, Topology
from gptpar.training.banner import refuse_what_cannot_fit
from tests.unit.test_plan import CALM, GIB, plan
from tests.unit.test_plan import SMALL as SHAPE

SMALL = SHAPE + "--micro-batch-size 2 "
OFFLOAD = "--cpu-optimizer --cpu-optimizer-ratio "
TEN_B = CALM + (
    "--num-layers 50 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --micro-batch-size 10 "
    "--recompute-granularity full "
)


def elements(flags: str) -> int:
    """Of the optimizer, with the units' padding: masters and moments are 12 bytes each."""
    return round(plan(flags).memory[0].optimizer / 12)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_what_is_offloaded_leaves_the_device(ratio: float) -> None:
    count = elements(SMALL)
    memory = plan(f"{SMALL} {OFFLOAD} {ratio}").memory[0]
    assert memory.parameters == 2 * count
    assert memory.optimizer == pytest.approx(12 * count * (1 - ratio))
    assert memory.gradients == pytest.approx((1 - ratio) * 4 * count + ratio * 2 * count)  # bf16 until it is used
    ring = RING_BYTES if ratio else 0
    assert memory.host == pytest.approx(SUSTAINED.host_process + ring + 12 * ratio * count)


def test_sums_over_micro_batches_stay_on_the_device() -> None:
    count = elements(SMALL)
    flags = f"{SHAPE} --micro-batch-size 1 --global-batch-size 4 {OFFLOAD} 1"
    assert plan(flags + " --cuda-graph off").memory[0].gradients == pytest.approx(6 * count)
    assert plan(flags).memory[0].gradients == pytest.approx(8 * count)  # a launched step, see below


def test_gradients_for_the_host_come_when_activations_have_gone() -> None:
    """Launched, they are never there together; a recorded step holds them all the time."""
    count = elements(TEN_B)
    kept = 50 * 10 * 1024 * 4096 * 2  # inputs of all blocks
    states = 2 * count
    (one,) = plan(f"{TEN_B} {OFFLOAD} 1 --cuda-graph off").memory
    assert (one.activations, one.gradients) == (0, 2 * count)
    assert one.allocated - one.buffers == states + 2 * count
    large = TEN_B.replace("--micro-batch-size 10", "--micro-batch-size 60")
    (one,) = plan(f"{large} {OFFLOAD} 1 --cuda-graph off").memory
    assert (one.activations, one.gradients) == (6 * kept, 0)
    (one,) = plan(f"{large} {OFFLOAD} 1").memory
    assert (one.activations, one.gradients) == (6 * kept, 2 * count)


def test_steps_before_a_recording_hold_gradients_twice() -> None:
    """The host still needs those of the last step; and of the activations, the device's layers' are there."""
    count = elements(TEN_B)
    (half,) = plan(f"{TEN_B} {OFFLOAD} 0.5").memory
    assert half.gradients == pytest.approx((0.5 * 4 + 0.5 * 2 * 2) * count)
    before = (50304 + 1024) * 4096
    share = (0.5 * count - before) / (count - before)
    assert half.activations == pytest.approx(share * 50 * 10 * 1024 * 4096 * 2, rel=1e-3)


def test_speculation_doubles_the_hosts_part_and_files_take_it_away(tmp_path: Path) -> None:
    count = elements(SMALL)
    base = SUSTAINED.host_process + RING_BYTES
    twice = plan(f"{SMALL} {OFFLOAD} 1 --offload-speculation on").memory[0]
    assert twice.host == pytest.approx(base + 24 * count)
    files = plan(f"{SMALL} {OFFLOAD} 1 --optimizer-nvme-path {tmp_path}").memory[0]
    assert files.host == pytest.approx(base)


def test_parameters_on_the_host_are_two_layers_on_the_device() -> None:
    count = elements(SMALL)
    here, there = plan(SMALL).memory[0], plan(f"{SMALL} --cpu-parameters").memory[0]
    assert there.parameters == 0 and there.host == pytest.approx(here.host + 2 * count)
    job = plan(SMALL).job
    assert here.buffers < there.buffers <= here.buffers + 2 * (job.units[0].length + 2 * job.units[2].length)


def test_the_cpus_time_counts_where_nothing_hides_it() -> None:
    """28 bytes an element, behind the forward pass and, with speculation, the backward pass."""
    waiting = plan(f"{TEN_B} --gpu h200 {OFFLOAD} 1 --offload-speculation off")
    stage = waiting.time.stages[0]
    updates = 28 * elements(f"{TEN_B} --gpu h200") / SUSTAINED.host_rate
    assert waiting.time.cpu_optimizer == pytest.approx(updates - stage.forward) and waiting.time.cpu_optimizer > 0
    speculating = plan(f"{TEN_B} --gpu h200 {OFFLOAD} 1")
    assert speculating.time.cpu_optimizer == pytest.approx(max(0.0, updates - stage.both))
    assert plan(f"{TEN_B} --gpu h200 {OFFLOAD} 0.2").time.cpu_optimizer == 0


def test_auto_is_the_least_that_fits_the_gpu() -> None:
    """10B parameters need 180 GB of weights, gradients and optimizer state; an H100 has 79 GiB."""
    large, small = (plan(f"{TEN_B} --gpu {gpu} {OFFLOAD} auto") for gpu in ("h200", "h100"))
    assert large.fits and small.fits and 0 < large.job.ratio < small.job.ratio < 1
    assert not plan(f"{TEN_B} --gpu h100 {OFFLOAD} {small.job.ratio - 0.05:.2f}").fits
    assert plan(f"{SMALL} --gpu h100 {OFFLOAD} auto").job.ratio == 0


def test_a_model_that_is_too_large_is_told_to_use_the_host() -> None:
    planner_plan = plan(f"{TEN_B} --gpu h100")
    assert not planner_plan.fits and planner_plan.need > 150 * GIB
    planner, _ = make_planner(f"{TEN_B} --gpu h100".split())
    best = planner.remedies(planner_plan)[0]
    assert best.fits and best.flags() == "--cpu-optimizer --cpu-optimizer-ratio auto"


def test_a_run_far_too_large_for_its_gpu_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 layers of 64 need about 6 MiB of states, and 64 MiB of workspace."""
    config = plan(SMALL).job.config
    topology = Topology(Layout(), 0, torch.device("cuda"))
    for capacity in (1 << 30, 1 << 24):
        properties = SimpleNamespace(total_memory=capacity)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        if capacity == 1 << 30:
            refuse_what_cannot_fit(config, topology)
        else:
            with pytest.raises(GptparError, match=r"stage 0 .* its GPU has 16.00 MiB: lower --micro-batch-size 2, add"):
                refuse_what_cannot_fit(config, topology)
    refuse_what_cannot_fit(config, Topology(Layout(), 0, torch.device("cpu")))
