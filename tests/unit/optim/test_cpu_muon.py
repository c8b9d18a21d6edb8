"""The compiled kernel of Muon's elementwise parts beside torch's operators, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gptpar.optim.cpu_adam import CpuMuon, _library
from gptpar.optim.muon import MUON, MuonHyperparameters
from gptpar.optim.torch_kernels import MatrixHostKernel
from tests.pairs import every_pair

RANGES = [(0, 5), (64, 1000), (1000, 4163)]
LENGTH = 4200
RATES = [MuonHyperparameters(3e-3, decay, 0.95) for decay in (0.1, 0.0, 0.3)]


def vectors(*dtypes: torch.dtype) -> list[torch.Tensor]:
    """Numbers of all magnitudes, with denormals and zeros."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in dtypes:
        exponents = torch.randint(-150, 10, (LENGTH,), generator=generator).double()
        found.append((torch.randn(LENGTH, generator=generator, dtype=torch.float64) * 2**exponents).to(dtype))
    return found


@every_pair(
    isa=[-1, 0, 1],
    low=[torch.bfloat16, torch.float16, torch.float32],
    grad=[torch.float32, torch.bfloat16],
    nesterov=[True, False],
)
def test_it_is_torchs_operators(nesterov: bool, grad: torch.dtype, low: torch.dtype, isa: int) -> None:
    library = _library()
    if library is None or library.lasting.cpu_adam_isa(isa) is None:
        pytest.skip("this processor has no such instruction set")
    muon = replace(MUON, nesterov=nesterov)
    ours, theirs = muon.host_kernel(3), MatrixHostKernel(muon, 1)
    assert isinstance(ours, CpuMuon)
    ours._isa = isa
    found = []
    for kernel in (ours, theirs):
        momentum, gradient, weights, directions, out, new = vectors(torch.float32, grad, torch.float32, *[low] * 3)
        ranges = [(*one, kernel.step_of(how, 7, 3.7)) for one, how in zip(RANGES, RATES, strict=True)]
        assert kernel.order_average(momentum, gradient, ranges, out)().finite
        kernel.order([weights], directions, ranges, low=new)()
        found.append((momentum, weights, out, new))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert not found[0][2][5:64].any() and not found[0][2][4163:].any()
    assert found[0][2][64:].any()
