"""What an update is tried on: every bit pattern, edges, and usual numbers."""

import math
from collections.abc import Sequence

import torch

from gptpar.optim import elementwise
from gptpar.optim.adam_update import AdamHyperparameters, UpdateNumbers, change
from gptpar.optim.adamw import ADAMW
from gptpar.optim.elementwise import divisor_on_device
from gptpar.optim.rounded_states import in_formats
from gptpar.optim.torch_kernels import step_numbers

FORMATS = [torch.float32, torch.bfloat16, torch.float16]
STEPS = [1, 2, 3, 1000, 65_535, 999_999, 1_000_000]
HOW = AdamHyperparameters(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
EDGES = [
    *(0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 2.0**-149, -(2.0**-149), 2.0**-126, 2.0**-127, 3.4028235e38),
    # and what 16 bits cannot hold, ties among it
    *(1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 65504.0, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25),
]


def uniform_bits(length: int, seed: int) -> torch.Tensor:
    """[length] fp32 values drawn uniformly over all bit patterns: denormals, infinities and NaN come as they come."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (length,), generator=generator, dtype=torch.int64).int().view(torch.float32)


def edge_cases() -> list[torch.Tensor]:
    """p, m, v and gradient: every combination of three edges, the gradient's against each of them."""
    values = torch.tensor(EDGES, dtype=torch.float64).float()
    p, m, grad = (grid.flatten() for grid in torch.meshgrid(values, values, values, indexing="ij"))
    return [p, m, grad.roll(7).abs(), grad]


def cases() -> list[list[torch.Tensor]]:
    """Vectors p, m, v and gradient in fp32."""
    drawn = [uniform_bits(40_007, seed) for seed in range(4)]
    generator = torch.Generator().manual_seed(9)
    usual = [torch.randn(10_007, generator=generator) for _ in range(4)]
    usual[2] = usual[2].square()
    return [drawn, edge_cases(), usual]


def kept(m: torch.Tensor, v: torch.Tensor, formats: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """Moments in stored number formats, rounded to nearest but for ties."""
    return list(in_formats(m, v, formats, torch.full((len(m),), 0x80008000 - 2**32, dtype=torch.int32)))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, any NaN being like any other."""
    as_bits = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return bool(((a.view(as_bits) == b.view(as_bits)) | (a.isnan() & b.isnan())).all())


def update(state: list[torch.Tensor], grad: torch.Tensor, numbers: UpdateNumbers, **others: torch.Tensor) -> None:
    """AdamW's definition, by torch's operators."""
    elementwise.update(change, state, grad, numbers.scale, numbers.decay, numbers.own, **others)


def numbers_on_device(step: torch.Tensor, norm: torch.Tensor, loss_scale: float, max_norm: float) -> list[float]:
    """The numbers of HOW by torch's operators in fp64, in the order of :class:`UpdateNumbers`."""
    scale, decay, own = step_numbers(ADAMW, HOW, step, divisor_on_device(norm, loss_scale, max_norm))
    return [number.item() for number in (scale, *own, decay)]
