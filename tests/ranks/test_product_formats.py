"""A number format that scales blocks of its operands: all products of a block's linear layers are in it, split or not.

The format stands for fp8: operands are rounded to it, with a scale for each block of the dimension summed over. So a
split model computes what the whole one does, although both round coarsely.
"""

from typing import Any

import pytest
import torch

from gptpar.model import linear
from gptpar.tensor_parallel import ALONE, products
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


def trained(rank: int, size: int, sequence_parallel: bool, format: str = "blocks") -> list[Result]:
    """Loss and whole gradients of each model."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(products.FORMATS, "blocks", in_blocks)
        patch.setattr(linear, "PLAIN", format)
        for flags in FLAGS:
            axis, InBlocks.count = (axis_of(rank, size, sequence_parallel) if size > 1 else ALONE), 0
            results.append(loss_and_whole_gradients(build(flags, axis), axis, ()))
            assert InBlocks.count == (NUM_PRODUCTS if format == "blocks" else 0)
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_format_with_scales_of_blocks_computes_the_same_on_two_ranks(sequence_parallel: bool) -> None:
    alone, plain = trained(0, 1, False), trained(0, 1, False, products.PLAIN)
    for number, found in enumerate(spawn(trained, 2, 2, sequence_parallel)[0]):
        assert_equal(found, alone[number], FLAGS[number])
        name = next(name for name in found[1] if name.endswith("qkv.weight"))
        assert (found[1][name] - plain[number][1][name]).norm() > 1e-3 * plain[number][1][name].norm()  # it rounds
