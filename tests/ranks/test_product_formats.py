"""A number format that scales blocks of its operands: all products of a block's linear layers are in it, split or not.

The format stands for fp8: operands are rounded to it, with a scale for each block of the dimension summed over. So a
split model computes what the whole one does, although both round coarsely.
"""

from typing import Any

import pytest
import torch

from gptpar.model import linear
from gptpar.tensor_parallel import ALONE, TensorAxis, products
from gptpar.tensor_parallel.products import product
from tests.ranks.test_tensor_parallel import LLAMA, Result, assert_equal, axis_of, build, loss_and_whole_gradients
from tests.spawn import spawn

FLAGS, BLOCK = ("", f"{LLAMA} --num-query-groups 2"), 4
NUM_PRODUCTS = 2 * 4 * 3
"""Of two blocks: QKV projection, output projection, up and down; forward, and the gradients of input and weight."""


def rounded(x_MK: torch.Tensor) -> torch.Tensor:
    """In fp8 (e4m3)."""
    blocks = x_MK.unflatten(1, (-1, BLOCK))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).to(x_MK.dtype) * scale).flatten(1)


class InBlocks(torch.autograd.Function):
    count = 0

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        InBlocks.count += 1
        return rounded(a) @ rounded(b.t()).t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return product(grad, b.t(), "blocks"), product(a.t(), grad, "blocks")


def in_blocks(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    assert out is None
    y = InBlocks.apply(a, b)
    return y if bias is None else y + bias


def trained(flags: str, axis: TensorAxis, number_format: str = "blocks") -> Result:
    """Loss and whole gradients of a model."""
    InBlocks.count = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(products.FORMATS, "blocks", in_blocks)
        patch.setattr(linear, "PLAIN", number_format)
        found = loss_and_whole_gradients(build(flags, axis), axis, ())
    assert InBlocks.count == (NUM_PRODUCTS if number_format == "blocks" else 0)
    return found


def trained_by_two(rank: int) -> list[list[Result]]:
    """Of each model: without and with sequence parallelism."""
    return [[trained(flags, axis_of(rank, 2, split)) for split in (False, True)] for flags in FLAGS]


def test_a_format_with_scales_of_blocks_computes_the_same_on_two_ranks() -> None:
    for flags, results in zip(FLAGS, spawn(trained_by_two, 2)[0], strict=True):
        alone, plain = trained(flags, ALONE), trained(flags, ALONE, products.PLAIN)
        for found in results:
            assert_equal(found, alone, flags)
        name = next(name for name in plain[1] if name.endswith("qkv.weight"))
        assert (alone[1][name] - plain[1][name]).norm() > 1e-3 * plain[1][name].norm()  # it rounds
