"""Copies of elements between any strides: what torch's copy gives, bit for bit."""

from random import Random

import pytest
import torch

from gptpar.system.strided_copy import copy_elements

SIZES = (1, 2, 3, 5, 31, 32, 33, 70)
PAIRS = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float64, torch.float64),
    (torch.uint8, torch.uint8),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
]


def view(random: Random, shape: list[int], dtype: torch.dtype, fill: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(memory, a view of it of that shape, whose dims lie in any order with gaps between the elements)."""
    order = random.sample(range(len(shape)), len(shape))
    steps = [random.choice([1, 1, 2]) for _ in shape]
    sizes = [shape[dim] * steps[dim] + random.randrange(3) for dim in order]
    memory = torch.randn(sizes, generator=torch.Generator().manual_seed(random.randrange(1000))) * 100
    memory = memory.to(dtype) if fill else torch.zeros(sizes, dtype=dtype)
    back = memory.permute([order.index(dim) for dim in range(len(shape))])
    return memory, back[tuple(slice(0, n * step, step) for n, step in zip(shape, steps, strict=True))]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("num_dims", [0, 2, 4])
def test_the_same_bits_as_torchs_copy_and_nothing_beside_them(
    pair: tuple[torch.dtype, torch.dtype], num_dims: int
) -> None:
    random, pairs, found = Random(num_dims), [], []
    for _ in range(30):
        shape = [random.choice(SIZES[: 8 if num_dims < 3 else 5]) for _ in range(num_dims)]
        _, source = view(random, shape, pair[1], fill=True)
        memory, target = view(random, shape, pair[0], fill=False)
        expected = memory.clone()
        expected.as_strided(target.shape, target.stride(), target.storage_offset()).copy_(source)
        pairs.append((target, source))
        found.append((memory, expected))
    copy_elements(iter(pairs))
    assert all(torch.equal(memory, expected) for memory, expected in found)


@pytest.mark.parametrize("strided", [False, True])
def test_every_upper_half_rounds_as_torch_rounds(strided: bool) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32) << 16
    lows = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (halves[:, None] | lows).view(torch.float32)
    found, wanted = torch.empty(values.shape, dtype=torch.bfloat16), values.bfloat16()
    copy_elements([(found.t(), values.t())]) if not strided else copy_elements([(found.t(), values.t().contiguous())])
    is_number = ~values.isnan()
    assert torch.equal(found[is_number].view(torch.int16), wanted[is_number].view(torch.int16))
    assert bool(found[~is_number].isnan().all())
