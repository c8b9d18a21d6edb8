"""SwiGLU (Shazeer 2020), whose backward pass reads and writes each number once.

Legend: N tokens, F the MLP's width on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gptpar.kernels import gpu


def swiglu(up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * value`` of [N, gate and value]."""
    return _Swiglu.apply(up)


def backward(grad_NF: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gradient [N, 2F] of :func:`swiglu`'s input.

    torch's compiler fuses both halves into one output, and computes each element from all three inputs: it reads them
    twice.
    """
    if gpu.takes(up):
        return gpu.gate.swiglu_backward(grad_NF, up)
    gate_NF, value_NF = up.chunk(2, dim=-1)
    of_gate_NF = torch.ops.aten.silu_backward(grad_NF * value_NF, gate_NF)
    return torch.cat([of_gate_NF, grad_NF * F.silu(gate_NF)], dim=-1)


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(up)
        gate_NF, value_NF = up.chunk(2, dim=-1)
        return F.silu(gate_NF) * value_NF

    @staticmethod
    def backward(ctx: Any, grad_NF: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return backward(grad_NF, *ctx.saved_tensors)
