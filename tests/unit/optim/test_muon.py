"""Muon's arithmetic: torch.optim.Muon's algorithm in fp64, scales, coefficients, matrices, and the CPU's kernel."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.optim import Muon as TorchMuon
from torch.utils.flop_counter import FlopCounterMode

from gptpar.optim.cpu_adam import CpuMuon, _library
from gptpar.optim.muon import COEFFICIENTS, MUON, Muon, MuonHyperparameters, coefficients, numbers
from gptpar.optim.torch_kernels import MatrixHostKernel
from gptpar.topology.matrices import WHOLE, Interleaved
from tests.pairs import every_pair
from tests.unit.optim.plain_runs import MUON_WORDS, assert_follows, muon

SHAPES = [(8, 8), (12, 5), (5, 12), (1, 6), (33, 32)]
ORIGINAL = "original", "shape_scaling", 1.0
SIMPLE = replace(MUON, iterations=coefficients("simple", 5))


@pytest.fixture
def uncast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's Muon without its cast to bf16."""
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)


def ours(update: Muon, weight: Tensor, grads: list[Tensor], how: MuonHyperparameters) -> Tensor:
    """The weight after these steps."""
    step = torch.ones((), dtype=torch.float64)
    own = numbers(MuonHyperparameters(*(torch.full_like(step, one) for one in how)), step)
    p, m = weight.clone(), torch.zeros_like(weight)
    for grad in grads:
        n, m = update.momentum(grad, m, own)
        p = (1 - how.lr * how.weight_decay) * p - own[0] * update.orthogonalize(n[None])[0]
    return p


@pytest.mark.usefixtures("uncast")
@every_pair(shape=SHAPES, nesterov=[True, False], scale=[("match_rms_adamw", "spectral", 0.2), ORIGINAL])
def test_it_is_torchs(shape: tuple[int, int], nesterov: bool, scale: tuple[str, str, float]) -> None:
    adjust, mode, factor = scale
    torch.manual_seed(0)
    weight, grads = torch.randn(shape, dtype=torch.float64), list(torch.randn((4, *shape), dtype=torch.float64))
    parameter = torch.nn.Parameter(weight.clone())
    torchs = TorchMuon([parameter], lr=0.03, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust)
    for grad in grads:
        parameter.grad = grad.clone()
        torchs.step()
    update = replace(SIMPLE, nesterov=nesterov, scale_mode=mode, factor=factor)
    found = ours(update, weight, grads, MuonHyperparameters(0.03, 0.1, 0.9))
    torch.testing.assert_close(found, parameter.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "steps", "off"), [("simple", 5, 0.36), ("quintic", 5, 0.2), ("polar_express", 8, 1e-3)]
)
def test_singular_values_come_near_1(kind: str, steps: int, off: float) -> None:
    torch.manual_seed(0)
    update = replace(MUON, iterations=coefficients(kind, steps), scale_mode="unit_rms_norm", factor=1.0)
    for rows, columns in ((64, 64), (40, 96), (96, 40)):
        found = update.orthogonalize(torch.randn(3, rows, columns, dtype=torch.float64))
        values = torch.linalg.svdvals(found) / (rows / columns) ** 0.5
        if (rows, columns) != (64, 64):  # a square matrix has singular values near 0
            assert (values - 1).abs().max() < off
        assert values.max() < 1.3


def test_a_batch_is_each_of_its_matrices() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 7, 5, dtype=torch.float64)
    torch.testing.assert_close(MUON.orthogonalize(x), torch.cat([MUON.orthogonalize(one[None]) for one in x]))


def test_matrices_without_a_gradient_stay() -> None:
    assert not MUON.orthogonalize(torch.zeros(2, 4, 3)).any()


def test_scales() -> None:
    scales = {mode: replace(MUON, scale_mode=mode) for mode in ("spectral", "unit_rms_norm", "shape_scaling")}
    assert [one.scale(8, 2) for one in scales.values()] == [8**0.5, 2, 2]
    assert [one.scale(2, 8) for one in scales.values()] == [8**0.5, 0.5, 1]


def test_coefficients_repeat() -> None:
    assert coefficients("simple", 3) == COEFFICIENTS["simple"] * 3
    assert coefficients("quintic", 10) == COEFFICIENTS["quintic"] * 2
    express = COEFFICIENTS["polar_express"]
    assert coefficients("polar_express", 5) == express[:5]
    assert coefficients("polar_express", 10) == (*express, express[-1], express[-1])


def test_flops_are_those_of_its_products() -> None:
    for rows, columns in pairwise((8, 12, 5, 5)):
        with FlopCounterMode(display=False) as counter:
            MUON.orthogonalize(torch.randn(2, rows, columns))
        assert counter.get_total_flops() == 2 * MUON.flops(rows, columns)


def test_what_is_a_matrix_of_a_qkv_weight() -> None:
    groups = Interleaved((6, 2, 2), 2)
    chosen = {qkv: replace(MUON, qkv=qkv).matrices(groups) for qkv in ("split", "heads", "fused")}
    assert chosen == {"split": groups, "heads": groups.heads, "fused": WHOLE}
    assert replace(MUON, qkv="heads").matrices(WHOLE) == WHOLE


@pytest.mark.slow
def test_training_follows_the_plain_formula() -> None:
    assert_follows(MUON_WORDS, "", muon())


# --- The compiled kernel of Muon's elementwise parts beside torch's operators, bit for bit --------------------------


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
    update = replace(MUON, nesterov=nesterov)
    ours, theirs = update.host_kernel(3), MatrixHostKernel(update, 1)
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
