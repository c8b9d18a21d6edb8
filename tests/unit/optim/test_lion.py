"""Lion beside its plain formula: training at every ratio, and the update's number formats."""

import pytest
import torch

from gptpar.optim.elementwise import UpdateVectors
from gptpar.optim.lion import LION, LionHyperparameters
from gptpar.optim.torch_kernels import make_device_kernel, make_host_kernel
from tests.unit.optim.plain_runs import LION_WORDS, assert_follows, lion


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--cpu-optimizer --cpu-optimizer-ratio 0.3",
        "--cpu-optimizer --cpu-optimizer-ratio 1 --offload-speculation on",
        "--cpu-optimizer --cpu-parameters",
    ],
)
def test_training_follows_the_plain_formula(flags: str) -> None:
    assert_follows(LION_WORDS, flags, lion())


@pytest.mark.parametrize(
    ("grad", "low"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float32)]
)
def test_the_host_has_the_device_s_bits(grad: torch.dtype, low: torch.dtype) -> None:
    """Clipped, with a loss scale; the host writes to a double buffer. Half of the elements do not decay."""
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(1000, generator=generator) for _ in range(3)]
    vectors[2] = vectors[2].to(grad)
    how = LionHyperparameters(1e-3, 0.9, 0.99, 0.1)
    ours, narrow = [t.clone() for t in vectors], torch.empty(1000, dtype=low)
    steps, norm = torch.tensor(4.0, dtype=torch.float64), torch.tensor(2.7, dtype=torch.float64)
    taken = make_device_kernel(LION, ours[0]).begin_step(how, norm, 3000.0, 0.3, steps)
    taken.update(UpdateVectors(tuple(ours), narrow, [(0, 500, True), (500, 1000, False)]))
    kernel = make_host_kernel(LION, 1)
    divisor = 3000.0 * ((2.7 + 1e-6) / 0.3)
    halves = [kernel.step_of(numbers, 5, divisor) for numbers in (how, how._replace(weight_decay=0.0))]
    new, other = [torch.empty(1000) for _ in range(2)], torch.empty(1000, dtype=low)
    ranges = [(0, 500, halves[0]), (500, 1000, halves[1])]
    assert kernel.order(vectors[:2], vectors[2], ranges, into=new, low=other)().finite
    assert all(torch.equal(a, b) for a, b in zip([*ours[:2], narrow], [*new, other], strict=True))
    assert steps.item() == 5 and not torch.equal(new[0], vectors[0])
