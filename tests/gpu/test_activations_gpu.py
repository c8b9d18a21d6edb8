"""Activations in host memory on a GPU: the same bits, and memory that the device has back between the passes."""

from typing import Any

import pytest
import torch
from torch import nn

from gptpar.model.block import Block
from gptpar.pipeline.host_activations import HostActivations
from gptpar.system.determinism import deterministic
from tests.gpu.training import run
from tests.helpers import tiny_config

pytestmark = pytest.mark.gpu

MODELS = {
    "gpt": "--bf16 --recompute-granularity selective --recompute-modules layernorm mlp",
    "nothing recomputed": "--bf16 --swiglu --normalization RMSNorm --position-embedding-type rope",
    "plain": "--fp32 --no-compile --recompute-granularity selective --recompute-modules core_attn mlp layernorm",
    "dropout": "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1",
    "windows": "--bf16 --num-query-groups 2 --window-size 5 --window-pattern SF",
    "all on the CPU": "--bf16 --cpu-optimizer --cpu-parameters --offload-gradients on",
}


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits(name: str) -> None:
    """Eight steps of two micro-batches."""
    flags = f"{MODELS[name].replace('--fp32 ', '')} --deterministic-mode --num-layers 3 --cuda-graph off"
    with deterministic(True):
        kept, some, every = (run("cuda:0", f"{flags} --cpu-offloading-num-layers {count}") for count in (0, 2, 3))
    for found in (some, every):
        assert found[0] == kept[0] and torch.equal(found[1], kept[1])


def test_inputs_of_recomputed_blocks_give_the_same_bits() -> None:
    flags = "--bf16 --deterministic-mode --recompute-granularity full --cuda-graph off"
    with deterministic(True):
        kept, left = run("cuda:0", flags), run("cuda:0", f"{flags} --checkpoint-in-cpu")
    assert left[0] == kept[0] and torch.equal(left[1], kept[1])


def test_the_device_has_the_memory_back_between_the_passes() -> None:
    """Of six blocks, the last one's tensors are there still, and those of the first five are not; nothing piles up."""
    model, host = tiny_config("--hidden-size 256 --num-attention-heads 4 --seq-length 256").model, HostActivations()
    blocks = [Block(model).to("cuda", torch.bfloat16).train() for _ in range(6)]
    for block in blocks:
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.02)
    x_ND = torch.randn(8 * 256, 256, device="cuda", dtype=torch.bfloat16)

    def held(keeps: bool) -> tuple[int, list[torch.Tensor]]:
        host.begin_pass()
        before, y_ND = torch.cuda.memory_allocated(), x_ND.clone().requires_grad_()
        z: Any = y_ND
        for block in blocks:
            args = (None, None, 256)
            z = host.call(block, z, *args) if keeps else block(z, *args)
        between = torch.cuda.memory_allocated() - before
        return between, [*torch.autograd.grad(z.float().square().sum(), [y_ND]), z.detach()]

    held(False)
    for _ in range(3):
        (plain, wanted), (left, found) = held(False), held(True)
        assert left < 0.3 * plain
        assert torch.equal(found[1], wanted[1])
        assert float((found[0] - wanted[0]).norm() / wanted[0].norm()) < 1e-2
    assert len({id(buffer) for buffer in host._free}) == len(host._free) > 0
