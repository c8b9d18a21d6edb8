"""Muon (Jordan et al. 2024): a matrix moves by its momentum, with all singular values of the momentum brought near 1.

With the clipped gradient g and the momentum m of a matrix [rows, columns]::

    m = momentum * m + (1 - momentum) * g
    n = (1 - momentum) * g + momentum * m       (Nesterov; else n = m)
    x = n / ||n||                               (Frobenius; transposed where rows > columns)
    x = a x + (b A + c A A) x,   A = x x^T      (Newton-Schulz, with (a, b, c) of each iteration)
    o = factor * scale(rows, columns) * x

The momentum averages, as torch's and Megatron's do. The sum ``momentum * m + g`` of other implementations is larger by
a factor, and the norm takes this factor out. Two conventions for the learning rate are published. With ``spectral`` and
the factor 0.2 (Liu et al. 2025, arXiv 2502.16982) an element moves as far as with AdamW, so that AdamW's learning rate
and weight decay carry over. With ``shape_scaling`` and the factor 1 (Jordan's) learning rates are about 0.02.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gptpar.config.sections.optimizer import OptimizerFlags
from gptpar.kernels import gpu
from gptpar.optim.cpu_adam import CpuMuon
from gptpar.optim.device_muon import TritonMuon
from gptpar.optim.elementwise import DeviceKernel
from gptpar.optim.matrix_update import MatrixUpdate
from gptpar.topology.matrices import WHOLE, Interleaved, Matrices

EPS = 1e-7
"""The least norm that a matrix is divided by."""

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""The iterations' (a, b, c), by Megatron's names: Jordan's, You's (Cesista et al. 2025), and Amsel et al. 2025's (arXiv
2505.16932, with its safety factor)."""


class MuonHyperparameters(NamedTuple):
    """One parameter group's hyperparameters in one step."""

    lr: float
    weight_decay: float
    momentum: float


def numbers(how: Any, step: Tensor) -> tuple[Tensor, ...]:
    """(lr, momentum, 1 - momentum)."""
    return how.lr, how.momentum, torch.ones_like(step) - how.momentum


def coefficients(kind: str, steps: int) -> tuple[tuple[float, float, float], ...]:
    """(a, b, c) of each iteration: beyond its set, Polar Express repeats the last one, and others the whole set."""
    of_kind = COEFFICIENTS[kind]
    if kind == "polar_express":
        return (*of_kind, *of_kind[-1:] * (steps - len(of_kind)))[:steps]
    return of_kind * (steps // len(of_kind))


@dataclass(frozen=True)
class Muon(MatrixUpdate):
    """Muon with the settings of a run.

    Attributes:
        nesterov: whether Nesterov's momentum is orthogonalized.
        iterations: (a, b, c) of each iteration.
        scale_mode, qkv: as ``--muon-scale-mode`` and ``--muon-qkv``.
        factor: of all updates.
    """

    nesterov: bool = True
    iterations: tuple[tuple[float, float, float], ...] = COEFFICIENTS["quintic"]
    scale_mode: str = "spectral"
    factor: float = 0.2
    qkv: str = "split"

    def with_settings(self, flags: OptimizerFlags) -> Self:
        return type(self)(
            *(self.name, self.states, self.hyperparameters, self.numbers),
            flags.muon_nesterov,
            coefficients(flags.muon_coefficient_type, flags.muon_num_ns_steps),
            flags.muon_scale_mode,
            flags.muon_extra_scale_factor,
            flags.muon_qkv,
        )

    @property
    def flags(self) -> tuple[str, ...]:
        settings = ("nesterov", "coefficient_type", "num_ns_steps", "scale_mode", "extra_scale_factor", "lr", "qkv")
        return (*super().flags, *(f"{self.name}_{setting}" for setting in settings))

    def momentum(self, g: Tensor, m: Tensor, numbers: Sequence[Any]) -> tuple[Tensor, Tensor]:
        _, momentum, rest = numbers
        fresh = rest * g
        m = momentum * m + fresh
        return fresh + momentum * m if self.nesterov else m, m

    def host_kernel(self, threads: int) -> CpuMuon:
        return CpuMuon(self, threads, nesterov=self.nesterov)

    def device_kernel(self, like: Tensor) -> DeviceKernel | None:
        return TritonMuon(self, like.dtype, nesterov=self.nesterov) if gpu.takes(like) else None

    def orthogonalize(self, x: Tensor) -> Tensor:
        _, rows, columns = x.shape
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=wide).clamp(min=EPS).to(x.dtype)
        y = x.mT if rows > columns else x
        y = torch.div(y, norm, out=x.new_empty(y.shape))
        has_kernel = gpu.takes(y) and y.dtype.itemsize == 2
        gram, polynomial = (gpu.product.gram, gpu.product.polynomial) if has_kernel else (_gram, _polynomial)
        factors = (*(1.0 for _ in self.iterations[1:]), self.factor * self.scale(rows, columns))
        for (a, b, c), factor in zip(self.iterations, factors, strict=True):
            y = polynomial(gram(y), a * factor, b * factor, c * factor) @ y
        return y.mT if rows > columns else y

    def scale(self, rows: int, columns: int) -> float:
        """The shape's factor of an update."""
        ratio = {"spectral": max(rows, columns), "unit_rms_norm": rows / columns}
        return math.sqrt(ratio.get(self.scale_mode, max(1.0, rows / columns)))

    def flops(self, rows: int, columns: int) -> float:
        short, long = sorted((rows, columns))
        return len(self.iterations) * (4.0 * short * short * long + 2.0 * short**3)

    def growth(self, fixed_outputs: bool) -> float:
        # Singular values are alike: an output changes by scale * |input| / sqrt(outputs), and |input| ~ sqrt(width).
        of_scale = {"spectral": 0.5, "unit_rms_norm": -0.5 if fixed_outputs else 0.0}.get(self.scale_mode, 0.0)
        return of_scale + (0.5 if fixed_outputs else 0.0)

    def matrices(self, declared: Matrices) -> Matrices:
        if not isinstance(declared, Interleaved) or self.qkv == "split":
            return declared
        return declared.heads if self.qkv == "heads" else WHOLE


def _gram(y: Tensor) -> Tensor:
    return y @ y.mT


def _polynomial(x: Tensor, a: float, b: float, c: float) -> Tensor:
    """``a I + b x + c x @ x``, like :func:`gptpar.kernels.triton.product.polynomial`."""
    total = torch.baddbmm(x, x, x, beta=b, alpha=c)
    total.diagonal(dim1=1, dim2=2).add_(a)
    return total


MUON = Muon("muon", ("exp_avg",), MuonHyperparameters, numbers)
