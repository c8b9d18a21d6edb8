"""Gradients that leave the GPU as soon as they are final: the same bits, bounded memory, and a loop that waits."""

import gc
import time

import pytest
import torch

from gptpar.offload import buckets, copying_transfers, gpu_transfers, machine
from gptpar.offload.copying_transfers import MAX_UNITS_WAITING, CopyingGpuTransfers
from gptpar.run import auto_offload
from gptpar.run.auto_offload import with_gradients
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh
from tests.gpu.offloaded_training import Slow, assert_same_bits, run
from tests.helpers import tiny_config

pytestmark = pytest.mark.gpu

ALL = "--cpu-optimizer --cpu-optimizer-ratio 1"
ONE = "--micro-batch-size 4"
DEVICE = torch.device("cuda", 0)
SLEEP = 1_000_000_000
"""Cycles of a GPU: about half a second."""


@pytest.fixture
def slow_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves the device time to write where it should not; and buckets are small."""
    monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 33_333)
    monkeypatch.setattr(machine, "BUCKET_ELEMENTS", 33_333)
    monkeypatch.setattr(machine, "make_host_kernel", lambda _, threads: Slow(threads))


@pytest.mark.usefixtures("slow_cpu")
@pytest.mark.parametrize("speculation", ["on", "off"])
@pytest.mark.parametrize("ratio", ["1", "0.731"])
@pytest.mark.parametrize("dtype", ["--bf16", "--fp64 --no-compile"])
def test_no_bit_changes(dtype: str, ratio: str, speculation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some steps are clipped."""
    monkeypatch.setattr(copying_transfers, "BUCKET_ELEMENTS", 33_333)
    words = f"{dtype} --clip-grad 1.75 --cpu-optimizer --cpu-optimizer-ratio {ratio} {ONE} --cuda-graph off"
    words += f" --offload-speculation {speculation} --offload-gradients"
    stay, leave = (run(f"{words} {word}", micro_batches=1) for word in ("off", "on"))
    assert any(norm > 1.75 for _, norm, _ in stay[0]) and any(norm < 1.75 for _, norm, _ in stay[0])
    assert_same_bits(leave, stay)


@pytest.mark.usefixtures("slow_cpu")
@pytest.mark.parametrize("speculation", ["on", "off"])
@pytest.mark.parametrize("ratio", ["1", "0.731"])
@pytest.mark.parametrize("dtype", ["--bf16", "--fp64 --no-compile", "--fp16 --no-compile --initial-loss-scale 1e7"])
def test_sums_on_the_host_are_those_of_the_gpu(
    dtype: str, ratio: str, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without clipping no bit changes but the norm's last ones; memory of gradients is used again at once."""
    if ratio != "1":
        monkeypatch.setattr(gpu_transfers, "RING_BYTES", 1)  # three slots
    words = f"{dtype} --clip-grad 0 --cpu-optimizer --cpu-optimizer-ratio {ratio} --micro-batch-size 1 --cuda-graph off"
    words += f" --offload-speculation {speculation} --offload-gradients"
    on = f"on --offload-gradients-ratio {1 if speculation == 'on' else 0.5}"
    stay, leave = (run(f"{words} {word}", micro_batches=4) for word in ("off", on))
    assert any(skipped for *_, skipped in stay[0]) == ("fp16" in dtype)
    for (loss, norm, skipped), (its_loss, its_norm, its_skipped) in zip(stay[0], leave[0], strict=True):
        assert (loss, skipped) == (its_loss, its_skipped)
        assert its_norm == pytest.approx(norm, rel=1e-6, nan_ok=True)
    assert all(torch.equal(leave[1][name], values) for name, values in stay[1].items())


def test_a_recorded_step_computes_the_same() -> None:
    words = f"--bf16 --clip-grad 1.75 {ALL} {ONE} --offload-gradients"
    recorded, leave = run(f"{words} off --cuda-graph on", micro_batches=1), run(f"{words} on", micro_batches=1)
    assert_same_bits(leave, recorded)


def test_overflows_are_skipped_alike() -> None:
    words = f"--fp16 --no-compile --initial-loss-scale 1e7 --hysteresis 1 {ALL} {ONE} --cuda-graph off"
    stay, leave = (run(f"{words} --offload-gradients {word}", micro_batches=1) for word in ("off", "on"))
    assert any(skipped for *_, skipped in stay[0])
    assert str(stay[0]) == str(leave[0])  # as text, for NaN
    assert all(torch.equal(leave[1][name], values) for name, values in stay[1].items())


def test_peak_memory_has_two_gradients_instead_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 blocks of 25 MB; nothing is updated before the norm is known, so that without copies all are there."""
    monkeypatch.setattr(machine, "make_host_kernel", lambda _, threads: Slow(threads))
    words = f"--bf16 --no-compile {ALL} {ONE} --num-layers 16 --hidden-size 1024 --cuda-graph off"
    words += " --offload-speculation off --offload-gradients"
    peaks, units = {}, []
    for word in ("off", "on"):
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        _, _, trainer = run(f"{words} {word}", steps=3, micro_batches=1)
        peaks[word] = torch.cuda.max_memory_allocated() - before
        units = [2 * unit.length for unit in trainer.engine.table.units]
        del trainer
    assert sum(units) > 400e6
    spared = sum(units) - (MAX_UNITS_WAITING + 1) * max(units)
    assert peaks["off"] - peaks["on"] == pytest.approx(spared, rel=0.15)
    assert peaks["on"] < sum(units) + (MAX_UNITS_WAITING + 3) * max(units) + 100e6  # parameters, and a few layers


def test_the_loop_waits_for_the_oldest_copy_alone() -> None:
    length = 1 << 20
    transfers = CopyingGpuTransfers(DEVICE, [length] * 4, 2)
    slots = transfers.own_staging([2 * length] * 4)
    assert all(slot is not None for slot in slots)
    with torch.cuda.stream(transfers.d2h_stream):
        torch.cuda._sleep(SLEEP)
    copies, waits = [], []
    before = torch.cuda.memory_allocated()
    for number, slot in enumerate(slots):
        grad = torch.full((length,), float(number), dtype=torch.bfloat16, device=DEVICE)
        copies.append(transfers.fetch(grad, transfers.now(), slot))
        del grad
        if number == 2:
            with torch.cuda.stream(transfers.d2h_stream):
                torch.cuda._sleep(SLEEP)  # before the fourth
        begun = time.perf_counter()
        transfers.hold_back()
        waits.append(time.perf_counter() - begun)
        assert torch.cuda.memory_allocated() - before <= MAX_UNITS_WAITING * 2 * length
    assert max(waits[:2]) < 0.02 < waits[2] and waits[3] < 0.02
    for number, copy in enumerate(copies):
        assert (copy.tensor() == number).all()
    assert torch.cuda.memory_allocated() == before
    transfers.close()


def test_memory_is_given_up_when_the_copy_is_known_to_be_done() -> None:
    length = 1 << 20
    transfers = CopyingGpuTransfers(DEVICE, [length], 2)
    before = torch.cuda.memory_allocated()
    grad = torch.ones(length, dtype=torch.bfloat16, device=DEVICE)
    with torch.cuda.stream(transfers.d2h_stream):
        torch.cuda._sleep(SLEEP)
    copy = transfers.fetch(grad, transfers.now(), transfers.own_staging([2 * length])[0])
    del grad
    assert not copy.arrived() and torch.cuda.memory_allocated() - before == 2 * length
    torch.cuda.synchronize()
    assert copy.arrived() and torch.cuda.memory_allocated() == before
    transfers.close()


def test_auto_compares_the_prediction_with_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology(Mesh(), 0, DEVICE)

    def decided(flags: str = "") -> tuple[str, str]:
        wide = "--num-layers 12 --hidden-size 512"
        found, told = with_gradients(tiny_config(f"--bf16 {ALL} {wide} {flags}"), topology)
        return found.offload.offload_gradients, told[0].reason if told else ""

    assert decided()[0] == "off" and "GiB are available" in decided()[1]
    monkeypatch.setattr(auto_offload.torch.cuda, "mem_get_info", lambda device: (0, 1 << 20))
    assert decided()[0] == "on" and decided()[1].endswith("and 1.00 MiB are available")
    assert decided("--global-batch-size 4")[0] == "on" and decided("--cuda-graph on")[0] == "auto"
