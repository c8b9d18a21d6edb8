"""Plans of runs whose optimizer or parameters live in host memory, against hand counts and measurements."""

from pathlib import Path

import pytest

from gptpar.offload.buckets import BUCKET_ELEMENTS
from gptpar.offload.copying_transfers import MAX_UNITS_WAITING, copying_bytes
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.plan.hardware import SUSTAINED
from gptpar.plan.host_updates import HostSpeed, Layer, speed_of, waiting
from gptpar.plan.planner import Plan
from gptpar.plan.report import plan_text
from tests.unit.plan.plans import CALM, GIB, OFFLOAD, SMALL, TEN_B, plan

IN_PAIRS = SMALL + "--micro-batch-size 2 "


# --- measurements ---------------------------------------------------------------------------------------------------

M350 = "--preset 350M --seq-length 1024 --micro-batch-size 16 "
ONE_B3 = "--preset 1.3B --seq-length 2048 --micro-batch-size 8 "
TWO_B7 = "--num-layers 32 --hidden-size 2560 --num-attention-heads 20 --seq-length 2048 --micro-batch-size 4 "
UNIFORM = " --recompute-method uniform --recompute-num-layers 1 "
FOURTEEN_B = (
    "--num-layers 46 --hidden-size 5120 --num-attention-heads 40 --seq-length 1024 --micro-batch-size 4 "
    "--recompute-granularity full"
)
CLIPPED = " --offload-speculation off"
"""A step that is clipped is one in which the CPU waits for the norm."""
EAGER = " --cuda-graph off --host-memory 128 "
# gpu, flags, milliseconds a step, GiB allocated at most; one GPU and 16 cores, medians of gptpar benchmark
MEASURED = [
    ("h100", "--preset 124M --micro-batch-size 32 ", 60.4, 12.87),
    ("h100", "--preset 350M --micro-batch-size 16 ", 170.2, 31.48),
    ("h100", ONE_B3, 257.3, 45.67),
    ("h100", TWO_B7, 267.5, 60.80),
    ("h100", M350 + OFFLOAD + "0.3", 83.9, 17.97),
    ("h100", M350 + OFFLOAD + "1" + CLIPPED, 132.2, 15.17),
    ("h100", ONE_B3 + OFFLOAD + "1" + CLIPPED, 408.5, 30.94),
    ("h100", ONE_B3 + OFFLOAD + "1", 292.1, 30.94),
]
# Measured when the device kept every gradient in fp32, also one that is no sum, and without those kernels.
MEASURED_WITH_WIDE_GRADIENTS = [
    ("h100", TEN_B + UNIFORM + EAGER + OFFLOAD + "0.9", 2978, 54.17),
    ("h200", "--preset 1.3B --seq-length 2048 --micro-batch-size 24 " + OFFLOAD + "0", 752.8, 100.60),
    # The CPU's 153 GB/s and the time are those of steps without speculation, though it was not switched off.
    ("h200", TEN_B + UNIFORM + OFFLOAD + "0.5" + CLIPPED, 2084, 118.43),
    ("h200", FOURTEEN_B + UNIFORM + EAGER + OFFLOAD + "0.638", 2355, 126.63),
]


def widened(planned: Plan) -> float:
    """Bytes that the first stage allocates at most when every gradient is kept in fp32, also one that is no sum."""
    job, memory = planned.job, planned.memory[0]
    device_elements = memory.optimizer / (3 * job.wide_size)
    assert device_elements > 0 and job.gradient_size < job.wide_size
    return memory.allocated + (job.wide_size - job.gradient_size) * device_elements


@pytest.mark.parametrize(
    ("gpu", "flags", "milliseconds", "gib", "wide"),
    [*((*row, False) for row in MEASURED), *((*row, True) for row in MEASURED_WITH_WIDE_GRADIENTS)],
)
def test_prediction_is_near_the_measurement(gpu: str, flags: str, milliseconds: float, gib: float, wide: bool) -> None:
    predicted = plan(f"{CALM} --gpu {gpu} {flags}")
    allocated = widened(predicted) if wide else predicted.memory[0].allocated
    assert allocated / GIB == pytest.approx(gib, rel=0.07)
    assert 1e3 * predicted.time.total == pytest.approx(milliseconds, rel=0.15)


# --- memory ---------------------------------------------------------------------------------------------------------


def elements(flags: str) -> int:
    """Of the optimizer, with the units' padding: master weights and moments are 12 bytes each."""
    return round(plan(flags).memory[0].optimizer / 12)


@pytest.mark.parametrize("ratio", [0.0, 0.25, 1.0])
def test_what_is_offloaded_leaves_the_device(ratio: float) -> None:
    count = elements(IN_PAIRS)
    memory = plan(f"{IN_PAIRS} {OFFLOAD} {ratio}").memory[0]
    assert memory.parameters == 2 * count
    assert memory.optimizer == pytest.approx(12 * count * (1 - ratio))
    assert memory.gradients == 2 * count  # as it comes, whoever uses it
    ring = RING_BYTES if ratio else 0
    kept = 2 * (64 * 128 if ratio == 1 else 0)  # the embedding's weights; else the device updates that
    assert memory.host == pytest.approx(SUSTAINED.host_process + ring + 12 * ratio * count + kept, rel=1e-9)


def test_sums_over_micro_batches_stay_on_the_device() -> None:
    """They leave from where they were summed, but for the embedding's early one."""
    count = elements(IN_PAIRS)
    flags = f"{SMALL} --micro-batch-size 1 --global-batch-size 4 {OFFLOAD} 1"
    for graph in ("off", "on"):
        assert plan(f"{flags} --cuda-graph {graph}").memory[0].gradients == pytest.approx(4 * count + 4 * 64 * 128)


def test_gradients_for_the_host_come_when_activations_have_gone() -> None:
    """Launched, only the embedding's is there with them; a recorded step holds them all the time."""
    count = elements(TEN_B)
    kept = 50 * 10 * 1024 * 4096 * 2  # inputs of all blocks
    states = 2 * count
    (one,) = plan(f"{TEN_B} {OFFLOAD} 1 --cuda-graph off").memory
    assert (one.activations, one.gradients) == (0, 2 * count)
    assert one.allocated - one.buffers == states + 2 * count
    large = TEN_B.replace("--micro-batch-size 10", "--micro-batch-size 60")
    (one,) = plan(f"{large} {OFFLOAD} 1 --cuda-graph off").memory
    assert (one.activations, one.gradients) == (6 * kept, 2 * 50304 * 4096)
    (one,) = plan(f"{large} {OFFLOAD} 1").memory
    assert (one.activations, one.gradients) == (6 * kept, 2 * count)


def test_speculation_doubles_the_hosts_part_and_files_take_it_away(tmp_path: Path) -> None:
    count = elements(IN_PAIRS)
    base = SUSTAINED.host_process + RING_BYTES
    twice = plan(f"{IN_PAIRS} {OFFLOAD} 1 --offload-speculation on").memory[0]
    assert twice.host == pytest.approx(base + 24 * count + 2 * 64 * 128)
    files = plan(f"{IN_PAIRS} {OFFLOAD} 1 --optimizer-nvme-path {tmp_path}").memory[0]
    assert files.host == pytest.approx(base)


def test_gradients_that_leave_at_once_are_three_layers_on_the_device() -> None:
    """Two wait for their copies while the next one is formed; all activations may be there."""
    count = elements(TEN_B)
    stay, leave = (plan(f"{TEN_B} {OFFLOAD} 1 --offload-gradients {word}") for word in ("off", "on"))
    largest = max(stay.job.unit(number).length for number in stay.job.stages[0].layers)
    assert not leave.job.graph and not leave.job.early_elements
    one = leave.memory[0]
    assert one.gradients == 2 * largest * (MAX_UNITS_WAITING + 1) and one.optimizer == 0
    assert one.activations == 50 * 10 * 1024 * 4096 * 2 and one.parameters == 2 * count
    assert stay.memory[0].gradients == 2 * count
    assert one.host == pytest.approx(SUSTAINED.host_process + 12 * count + copying_bytes(count, 2, 53), rel=1e-12)
    half = plan(f"{TEN_B} {OFFLOAD} 0.5 --offload-gradients on").memory[0]
    assert half.gradients == pytest.approx(one.gradients + count)  # the device's own half stays as it is


def test_ten_billion_parameters_fit_into_31_gib() -> None:
    """44 GiB with their gradients there, launched kernel by kernel."""
    stay = plan(f"{TEN_B} {OFFLOAD} 1 --gpu-memory 46 --cuda-graph off --offload-gradients off")
    assert stay.need / GIB == pytest.approx(44, abs=0.5)
    leave = plan(f"{TEN_B} {OFFLOAD} 1 --gpu-memory 31 --host-memory 256")
    assert leave.fits and leave.need < 31 * GIB and leave.flags() == "--offload-gradients on"
    assert (leave.memory[0].host - SUSTAINED.host_process) / GIB == pytest.approx(134, abs=0.5)
    assert leave.time.total <= 1.02 * stay.time.total


# --- time -----------------------------------------------------------------------------------------------------------

SPEED = HostSpeed(
    update=2.0 / BUCKET_ELEMENTS,
    speculate=3.0 / BUCKET_ELEMENTS,
    pause=0.5,
    fetch=0.1 / BUCKET_ELEMENTS,
    send=0.1 / BUCKET_ELEMENTS,
)
BUCKET = Layer(forward=1.0, backward=1.0, elements=BUCKET_ELEMENTS)


def test_without_speculation_each_layer_waits_for_its_update() -> None:
    """2.5 a bucket, from the first layer's gradient's arrival on; parameters travel for 0.1, a forward pass takes 1."""
    assert waiting([BUCKET] * 4, 0, 0.0, SPEED) == pytest.approx(0.1 + 4 * 2.5 + 0.1 + 1 - 4)
    assert waiting([BUCKET] * 4, 0, 1.5, SPEED) == pytest.approx(
        0.1 + 4 * 2.5 + 0.1 + 1 - 4 - 1.5
    )  # behind the device's own
    assert waiting([Layer(9.0, 1.0), BUCKET], 0, 0.0, SPEED) == 0  # behind what the device keeps
    assert waiting([Layer(2.0, 1.0), BUCKET], 0, 0.0, SPEED) == pytest.approx(2.5 + 0.1 - 2)


def test_speculation_takes_what_is_needed_first_of_what_is_here() -> None:
    """Gradients are here at 1.1, 11.1, and 12.1; the last layer is updated at once, 3.5 each; then the norm comes."""
    layers = [BUCKET, BUCKET, Layer(1.0, 10.0, BUCKET_ELEMENTS), BUCKET]
    everything = 4 * BUCKET_ELEMENTS
    assert waiting(layers, everything, 10.0, SPEED) == 0
    # Until 13, one of the last layer's and one of the others': the first layer is updated when the norm is known.
    assert waiting(layers, everything, 0.0, SPEED) == pytest.approx((11.1 + 3.5 - 13) + 2 * 2.5 + 0.1 - 1)
    assert waiting(layers, 0, 0.0, SPEED) == pytest.approx(0.1 + 4 * 2.5 + 0.1 + 1 - 4)


def test_what_comes_early_is_completed_when_the_backward_pass_is_over() -> None:
    """The embedding is updated from 0.1 to 2.85, while the layer's gradient comes; a quarter of it then, in 1.25."""
    early = Layer(1.0, 0.0, BUCKET_ELEMENTS, late=BUCKET_ELEMENTS / 4)
    layers = [early, Layer(1.0, 10.0, BUCKET_ELEMENTS)]
    everything = 2 * BUCKET_ELEMENTS
    # Its complete gradient is behind the layer's, which is updated after it.
    assert waiting(layers, everything, 0.0, SPEED) == pytest.approx(0.2 + 1.25 + 2.5 + 0.1 - 1)
    once = [Layer(1.0, 0.0, BUCKET_ELEMENTS), layers[1]]
    assert waiting(once, everything, 0.0, SPEED) > waiting(layers, everything, 0.0, SPEED)
    assert waiting(layers, 0, 0.0, SPEED) == waiting(once, 0, 0.0, SPEED)


@pytest.mark.parametrize(("world", "slower"), [(1, 1.0), (2, 2 * 150 / 220), (16, 8 * 150 / 220)])
def test_processes_share_the_bandwidth_of_their_machine(world: int, slower: float) -> None:
    """Of 16, each machine has 8."""
    planned = plan(f"{IN_PAIRS} --gpu h200 --world-size {world} --global-batch-size 32 {OFFLOAD} 1")
    speed = speed_of(planned.job, planned.cluster)
    assert speed.update == pytest.approx(slower * 30 / SUSTAINED.host_rate)  # sums travel in fp32
    assert speed.speculate == pytest.approx(slower * 30 / SUSTAINED.host_rate_aside)


def test_a_device_without_the_optimizer_has_less_to_do() -> None:
    """No update; but the norm is read in the backward pass. Without sums, the device's gradients are only copied."""
    here, there = plan(f"{TEN_B} --gpu h200").time, plan(f"{TEN_B} --gpu h200 {OFFLOAD} 1").time
    assert there.optimizer == 0 and here.optimizer == pytest.approx(30 * elements(TEN_B) / (SUSTAINED.memory * 4.8e12))
    assert there.compute - here.compute == pytest.approx(
        (6 - 4) * elements(TEN_B) / (SUSTAINED.memory * 4.8e12), rel=0.03
    )
    summed = [plan(f"{TEN_B} --gpu h200 --global-batch-size 20 {flags}").time for flags in ("", f"{OFFLOAD} 1")]
    assert summed[0].optimizer == pytest.approx(34 * elements(TEN_B) / (SUSTAINED.memory * 4.8e12))
    assert summed[0].compute == pytest.approx(summed[1].compute)  # 10 bytes an element in each of two backward passes


# --- verdicts -------------------------------------------------------------------------------------------------------


def test_auto_is_the_least_that_fits_the_gpu() -> None:
    """10B parameters need 180 GB of weights, gradients and optimizer state; an H100 has 79 GiB."""
    large, small = (plan(f"{TEN_B} --gpu {gpu} {OFFLOAD} auto") for gpu in ("h200", "h100"))
    assert large.fits and small.fits and 0 < large.job.ratio < small.job.ratio < 1
    assert not plan(f"{TEN_B} --gpu h100 {OFFLOAD} {small.job.ratio - 0.05:.2f} --offload-gradients off").fits
    assert plan(f"{IN_PAIRS} --gpu h100 {OFFLOAD} auto").job.ratio == 0


# --- gradients and parameters on the host ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "memory", "leave"), [("", 60, False), ("", 40, True), ("--cpu-parameters", 20, True)]
)
def test_auto_moves_gradients_where_they_do_not_fit(flags: str, memory: int, leave: bool) -> None:
    planned = plan(f"{TEN_B} {OFFLOAD} 1 --gpu-memory {memory} {flags}")
    assert planned.gradients is not None and planned.job.gradients_leave_at_once == leave
    assert planned.gradients.free == memory * GIB and (planned.gradients.needed > memory * GIB) == leave
    text = " ".join(plan_text(planned, []).split())
    assert f"gradients leave the GPU {'at once' if leave else 'when they are used'}" in text
    assert f"{planned.gradients.needed / GIB:.2f} GiB are expected" in text


@pytest.mark.parametrize(("memory", "share"), [(80, 0.0), (68, 0.5), (54, 1.0)])
def test_auto_takes_the_smallest_share_of_sums_that_fits_and_names_it(memory: int, share: float) -> None:
    """The flags that a plan prints are the run's choice: with them, the plan is the same."""
    batch = "--seq-length 1024 --micro-batch-size 8 --global-batch-size 256"
    flags = f"{CALM} --preset 6.7B {batch} --gpu-memory {memory} {OFFLOAD} 1"
    planned = plan(flags)
    assert planned.job.config.offload.summed_ratio == share
    assert planned.need <= memory * GIB and plan(f"{flags} {planned.flags()}").need == planned.need


def test_the_ratio_that_is_to_be_found_comes_first() -> None:
    """Gradients move only where not even everything on the CPU fits."""
    at_50, at_31 = (plan(f"{TEN_B} {OFFLOAD} auto --gpu-memory {memory}") for memory in (50, 31))
    assert not at_50.job.gradients_leave_at_once and 0.9 < at_50.job.ratio <= 1 and at_50.fits
    assert at_31.job.gradients_leave_at_once and at_31.job.ratio == 1 and at_31.fits
