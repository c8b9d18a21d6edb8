"""Plans of runs with options: activations and sums on the host, rounded moments, Muon, the memory mirror."""

import pytest

from gptpar.engine.ranges import Home
from gptpar.offload.copying_transfers import MAX_UNITS_WAITING
from gptpar.offload.gpu_transfers import RING_BYTES
from gptpar.offload.host_sums import sums_bytes
from gptpar.optim.adamw import ADAMW, adamw_with
from gptpar.plan.hardware import SUSTAINED
from gptpar.plan.host_updates import speed_of
from gptpar.plan.job import Job
from gptpar.plan.matrices import flops_of_step
from gptpar.plan.planner import Plan
from gptpar.plan.report import plan_json, plan_text
from gptpar.topology.mesh import Mesh
from tests.helpers import make_trainer, tiny_config
from tests.unit.plan.plans import CALM, GIB, OFFLOAD, SMALL, TEN_B, block_bytes, plan


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


# --- Plans of runs whose gradients are summed over micro-batches in host memory -------------------------------------


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


# --- Rounded moments in plans: bytes on the GPU and on the host as a run allocates them, and fewer ------------------


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


def test_bytes_of_an_elements_state() -> None:
    assert adamw_with("fp32", "fp32") is ADAMW and ADAMW.state_bytes(4) == 12 and ADAMW.state_bytes(8) == 24
    for name, sizes in (("bf16", (8, 12)), ("fp8", (6, 10))):
        both = adamw_with(name, name)
        assert (both.state_bytes(4), both.state_bytes(8)) == sizes


# --- What Muon costs: figures known from elsewhere, and the memory of the run itself --------------------------------


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


SPECULATING = "--cpu-optimizer --cpu-optimizer-ratio 0.5 --offload-speculation on"
MUON_OFFLOADED = f"{MUON} --no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio"


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        (SPECULATING, 12),
        (f"{SPECULATING} --exp-avg-sq-dtype bf16", 10),
        (SPECULATING + BOTH, 8),
        (SPECULATING + BOTH.replace("bf16", "fp8"), 6),
        (MUON, 12),
        (f"{MUON_OFFLOADED} 0.3", 12),
        (f"{MUON_OFFLOADED} 1", 12),
    ],
)
def test_states_take_what_the_run_gives_them(flags: str, size: int) -> None:
    """Of Muon's matrices, which are the groups from 2 on, there is one moment less."""
    config = tiny_config(flags)
    trainer, job = make_trainer(config), Job(config, Mesh(), "cpu")
    table, vectors = trainer.engine.table, trainer.engine.optimizer.vectors.values()
    on_host = (0, 0) if trainer.host is None else trainer.host.state_bytes
    states = sum(vector.nbytes for vector in vectors), on_host[0]
    assert states == (job.device_state_bytes(job.stages[0]), job.host_state(job.stages[0]).num_bytes)
    for home, found in zip((Home.DEVICE, Home.HOST), states, strict=True):
        matrices = sum(one.length for one in table.ranges(home=home) if MUON in flags and one.group >= 2)
        assert found == pytest.approx(size * table.length(home) - 4 * matrices, abs=4 * 64 * 20 if matrices else 0)
    assert SPECULATING not in flags or on_host[1] == on_host[0]
    trainer.close()


# --- The memory mirror in a plan: bytes of a machine's memory, and seconds of a step --------------------------------


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
    found = plan(f"{flags} --mirror-interval 20")
    assert not found.fits and found.host_need / GIB == pytest.approx(41.4, abs=0.1)
    assert "need 41.41 GiB of host memory and it has 40.00 GiB" in found.shortage()


def test_double_buffers_take_what_is_free_of_a_machine() -> None:
    """As a run does: up to 90 % of what the process itself leaves, and no more than one for each element."""
    flags = "--preset 1.3B --bf16 --vocab-size 50257 --micro-batch-size 4 --global-batch-size 64 --world-size 1 "
    flags += "--cpu-optimizer --cpu-optimizer-ratio 1 "
    tight, wide = plan(flags + "--host-memory 25"), plan(flags + "--host-memory 100")
    assert (tight.host_need + tight.double_buffers) / GIB == pytest.approx(3 + 0.9 * (25 - 3), rel=1e-6)
    assert wide.double_buffers == wide.job.host_state(wide.job.stages[0]).num_bytes
    for more in ("", "--host-memory 25 --offload-speculation off", "--host-memory 40 --offload-speculation on"):
        assert plan(flags + more).double_buffers == 0
