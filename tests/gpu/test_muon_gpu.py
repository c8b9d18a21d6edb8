"""Muon on a GPU: the fused elementwise parts have the bits of torch's operators, and no ratio changes a bit."""

from dataclasses import replace

import pytest
import torch

from gptpar.kernels import gpu
from gptpar.offload import buckets, gpu_transfers
from gptpar.optim.device_muon import TritonMuon
from gptpar.optim.elementwise import UpdateVectors
from gptpar.optim.muon import MUON, MuonHyperparameters
from gptpar.optim.torch_kernels import MatrixDeviceStep, TorchDeviceKernel, make_device_kernel
from tests.gpu.offloaded_training import OFFLOAD, assert_same_bits, run

pytestmark = pytest.mark.gpu
LENGTH = 100_003


@pytest.mark.parametrize("norm", [0.5, 30.0, float("nan")])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nesterov", [True, False])
def test_it_has_the_bits_of_torchs_operators(nesterov: bool, grad: torch.dtype, low: torch.dtype, norm: float) -> None:
    muon = replace(MUON, nesterov=nesterov)
    like = torch.zeros(1, device="cuda")
    kernels = make_device_kernel(muon, like), TorchDeviceKernel(muon, like.dtype)
    assert isinstance(kernels[0], TritonMuon)
    found = []
    for kernel in kernels:
        generator = torch.Generator("cuda").manual_seed(0)
        momentum, gradient, weights, directions, out, parameters = (
            torch.randn(LENGTH, device="cuda", generator=generator).to(dtype)
            for dtype in (torch.float32, grad, torch.float32, low, low, low)
        )
        steps = torch.zeros((), dtype=torch.float64, device="cuda")
        size = torch.tensor(norm, dtype=torch.float64, device="cuda")
        step = kernel.begin_step(MuonHyperparameters(3e-3, 0.1, 0.95), size, 3.0, 1.0, steps)
        assert isinstance(step, MatrixDeviceStep)
        step.average(momentum, gradient, out)
        ranges = ((0, 1000, True), (1024, LENGTH, False))
        step.update(UpdateVectors((weights, directions), parameters, ranges))
        found.append((momentum, weights, steps, *((out, parameters) if norm == norm else ())))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "matrices, rows, columns", [(2, 130, 70), (1, 300, 64), (3, 40, 200), (4, 1024, 1024), (1, 512, 2048)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_symmetric_products_are_rounded_once(matrices: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    x = (torch.randn(matrices, rows, columns, device="cuda") / columns**0.5).to(dtype)
    least = torch.finfo(dtype).eps
    found, exact = gpu.product.gram(x), x.double() @ x.double().mT
    assert (found - exact).abs().max() < least * exact.abs().max()
    wide = found.double()
    polynomial = gpu.product.polynomial(found, 3.4, -4.7, 2.0)
    exact = 3.4 * torch.eye(rows, device="cuda", dtype=torch.float64) - 4.7 * wide + 2.0 * wide @ wide.mT
    assert (polynomial - exact).abs().max() < least * exact.abs().max()


@pytest.mark.parametrize("shape", [(3, 256, 1024), (2, 1024, 256), (1, 130, 130)])
def test_sixteen_bits_orthogonalize_nearly_as_fp64_does(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, device="cuda").bfloat16()
    found, exact = MUON.orthogonalize(x), MUON.orthogonalize(x.double())
    assert (found - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("small", [False, True], ids=["", "small ring and buckets"])
@pytest.mark.parametrize("words", ["", "--offload-gradients on"])
def test_no_ratio_changes_a_bit(words: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = 1 if words else 2  # gradients that leave as they come have no sum
    muon = f"--bf16 --clip-grad 1.75 --optimizer muon --micro-batch-size {4 // parts}"
    plain = run(muon, micro_batches=parts)
    if small:
        monkeypatch.setattr(gpu_transfers, "RING_BYTES", 1)
        monkeypatch.setattr(buckets, "BUCKET_ELEMENTS", 3333)
    for ratio in (0.3, 0.731, 1):
        found = run(f"{muon} {OFFLOAD} {ratio} {words if ratio == 1 else ''}", micro_batches=parts)
        assert_same_bits(found, plain)
