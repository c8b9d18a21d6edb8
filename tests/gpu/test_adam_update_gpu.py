"""One update, the same bits: Triton's kernels beside torch's operators and the CPU's, and training at every ratio."""

import pytest
import torch

from gptpar.optim.adam_arguments import AdamStep
from gptpar.optim.adam_update import step_numbers
from gptpar.optim.adamw import ADAMW, adamw_with
from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.device_adam import TritonAdam
from gptpar.optim.elementwise import DeviceKernel, UpdateVectors, clipped_divisor
from gptpar.optim.group_ranges import ALIGNMENT
from gptpar.optim.rounded_states import KEPT_IN, in_formats
from gptpar.optim.torch_kernels import TorchDeviceKernel
from tests.gpu.offloaded_training import OFFLOAD, assert_same_bits, run
from tests.unit.optim.update_cases import FORMATS, HOW, STEPS, cases, numbers_on_device, same, update

pytestmark = pytest.mark.gpu
CLIPPING = [(2.7, 1.0, 0.3), (0.1, 3000.0, 0.3), (5.0, 3000.0, 0.0)]
"""Norm, loss scale and largest norm."""


def on_gpu(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64, device="cuda")


@pytest.mark.parametrize("grad", FORMATS, ids=str)
@pytest.mark.parametrize("low", FORMATS, ids=str)
@pytest.mark.parametrize("clipping", CLIPPING)
def test_triton_and_torch_compute_the_definition(
    grad: torch.dtype, low: torch.dtype, clipping: tuple[float, float, float]
) -> None:
    """Half of the blocks decay; all bit patterns, edges and the usual, at steps 1 to a million."""
    norm, loss_scale, max_norm = clipping
    for case in cases():
        length = len(case[0]) // ALIGNMENT // 2 * ALIGNMENT
        cut = length // ALIGNMENT // 2 * ALIGNMENT
        group_ranges = ((0, cut, True), (cut, length, False))
        decays = torch.arange(length // ALIGNMENT, device="cuda") < cut // ALIGNMENT
        p, m, v, g = (vector[:length].cuda() for vector in case)
        for step in STEPS:
            how = AdamStep(*HOW, step, clipped_divisor(norm, loss_scale, max_norm))
            expected = [t[:length].clone() for t in case[:3]]
            narrow = torch.empty(length, dtype=low)
            ranges = [(0, cut, how), (cut, length, AdamStep(**{**vars(how), "weight_decay": 0.0}))]
            CpuAdam(4).steps(expected, case[3][:length].to(grad), ranges, low=narrow)
            adams: list[DeviceKernel] = [TritonAdam(p.device), TorchDeviceKernel(ADAMW, torch.float32)]
            for adam in adams:
                state, live, steps = [t.clone() for t in (p, m, v)], torch.empty_like(p, dtype=low), on_gpu(step - 1.0)
                taken = adam.begin_step(HOW, on_gpu(norm), loss_scale, max_norm, steps)
                taken.update(UpdateVectors((*state, g.to(grad)), live, group_ranges, decays))
                assert (steps.item(), taken.skipped.item()) == (step, 0)
                for name, ours, true in zip(("p", "m", "v", "low"), [*state, live], [*expected, narrow], strict=True):
                    assert same(ours.cpu(), true), (adam, name, step)


@pytest.mark.parametrize("first", [torch.float32, *KEPT_IN.values()], ids=str)
@pytest.mark.parametrize("second", [torch.float32, *KEPT_IN.values()], ids=str)
def test_moments_are_rounded_as_on_the_cpu(first: torch.dtype, second: torch.dtype) -> None:
    """All bit patterns, edges and the usual, by Triton's kernel and by torch's operators."""
    updates = adamw_with("bf16", "bf16")
    for p, m, v, g in cases():
        nearest = torch.full((len(p),), 0x80008000 - 2**32, dtype=torch.int32)
        old, low = [p, *in_formats(m, v, (first, second), nearest)], torch.empty(len(p), dtype=torch.bfloat16)
        for step in (1, 7, 999_999):
            expected = [t.clone() for t in old]
            CpuAdam(4).steps(expected, g, [(0, len(p), AdamStep(*HOW, step, clipped_divisor(2.7, 1.0, 0.3)))], low=low)
            adams: list[DeviceKernel] = [TritonAdam(torch.device("cuda", 0)), TorchDeviceKernel(updates, torch.float32)]
            for adam in adams:
                state, live = [t.cuda() for t in old], torch.empty(len(p), dtype=torch.bfloat16, device="cuda")
                taken = adam.begin_step(HOW, on_gpu(2.7), 1.0, 0.3, on_gpu(step - 1.0))
                taken.update(UpdateVectors((*state, g.cuda()), live, ((0, len(p), True),)))
                for name, ours, true in zip(("p", "m", "v", "low"), [*state, live], [*expected, low], strict=True):
                    assert same(ours.cpu(), true), (adam, name, step)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("clipping", [*CLIPPING, (0.77, 1.0, 0.7), (0.7, 3000.0, 0.7)])
def test_numbers_are_those_of_the_host(step: int, clipping: tuple[float, float, float]) -> None:
    """Triton's in fp32, torch's in fp64."""
    norm, loss_scale, max_norm = clipping
    expected = step_numbers(HOW, step, clipped_divisor(norm, loss_scale, max_norm))
    assert numbers_on_device(on_gpu(step), on_gpu(norm), loss_scale, max_norm) == list(expected)
    taken = TritonAdam(torch.device("cuda", 0)).begin_step(HOW, on_gpu(norm), loss_scale, max_norm, on_gpu(step - 1.0))
    assert taken.numbers[:-2].tolist() == torch.tensor(list(expected), dtype=torch.float32).tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("norm", [float("inf"), float("nan")])
def test_a_step_that_is_skipped_changes_nothing_and_does_not_count(norm: float) -> None:
    vectors = tuple(torch.full((100,), value, device="cuda") for value in (1.0, 2.0, 3.0, 4.0))
    live, steps = torch.full((100,), 7.0, device="cuda", dtype=torch.bfloat16), on_gpu(5.0)
    taken = TritonAdam(steps.device).begin_step(HOW, on_gpu(norm), 1.0, 0.3, steps)
    taken.update(UpdateVectors(vectors, live, ((0, 100, True),)))
    assert (steps.item(), taken.skipped.item()) == (5, 1)
    assert [t.unique().tolist() for t in (*vectors, live)] == [[1.0], [2.0], [3.0], [4.0], [7.0]]


def test_fp64_has_the_cpus_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    case = [torch.randn(5003, generator=generator, dtype=torch.float64) for _ in range(4)]
    case[2] = case[2].square()
    numbers = step_numbers(HOW, 7, 3.7)
    on_cpu, on_device = [t.clone() for t in case], [t.cuda() for t in case]
    update(on_cpu[:3], on_cpu[3], numbers)
    update(on_device[:3], on_device[3], numbers)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_device, on_cpu, strict=True))


@pytest.mark.parametrize("dtype", ["--bf16", "--fp16 --initial-loss-scale 3000", "", "--fp64 --no-compile"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_no_ratio_changes_a_bit_of_training(dtype: str, micro_batches: int) -> None:
    """20 steps, some of them clipped; the cuts lie inside parameters."""
    words = f"{dtype} --clip-grad 1.75 --micro-batch-size {4 // micro_batches} {OFFLOAD}"
    first, *others = (run(f"{words} {ratio}", 20, micro_batches) for ratio in ("0", "0.3", "0.731", "1"))
    assert any(norm > 1.75 for _, norm, _ in first[0]) and any(norm < 1.75 for _, norm, _ in first[0])
    for other in others:
        assert_same_bits(other, first)
