"""``product``: every product of a layer's tokens with a weight, in a number format.

A linear layer computes three products: its output sums over input features, its input's gradient over output features,
and its weight's gradient over tokens. All three are calls of :func:`product`, or of :func:`add_product` where a sum of
gradients is there, so that a format is one row of ``FORMATS``. A format's scales must be those of the whole logical
tensor, or of blocks along the dimension that is summed over. With scales of one rank's part, numbers would depend on
the layout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

PLAIN = "plain"
"""The format of operands that are multiplied as they are; sums of bf16 and fp16 are in fp32."""


def _plain(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)


FORMATS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor]] = {
    PLAIN: _plain
}
"""Name -> function of (a, b, bias, out). Some layers leave the two gradients of their product to autograd. So
the function must be differentiable, or define its gradients by two products in the same format."""


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    format: str = PLAIN,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``a @ b + bias`` of two matrices, [M, K] and [K, N] -> [M, N], optionally into ``out``.

    Args:
        format: a name in ``FORMATS``; a text, because compiled operators pass it on.
        bias: [N].
    """
    return FORMATS[format](a, b, bias, out)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, format: str = PLAIN) -> None:
    """``total += a @ b``, in the product's own pass: [M, N], [M, K] and [K, N].

    Args:
        total: of the operands' dtype or wider; the product is not rounded to the operands' dtype before it is added.
        format: of the product; those that scale their operands are added in a pass of their own.
    """
    if format != PLAIN:
        total += product(a, b, format)
    elif total.is_cuda and total.dtype != a.dtype:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
