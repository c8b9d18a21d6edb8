"""The MLP in tiles of tokens, and with an activation that is computed again, against the MLP as a whole."""

from dataclasses import replace

import pytest
import torch

from gptpar.config.sections.mlp import GATES
from gptpar.model.activations import FUNCTIONS
from gptpar.model.block import MLP
from gptpar.model.linear import Linears
from tests.helpers import tiny_config
from tests.pairs import every_pair

TOKENS, WIDTH = 11, 32


def flags_of(name: str) -> str:
    return "--swiglu " if name == "swiglu" else f"--mlp-activation {name} "


def trained(mlp: MLP, x: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of the input and of every parameter; those of biases that another function sums."""
    x = x.clone().requires_grad_()
    y = mlp.train()(x)
    wanted = [x, *(parameter for parameter in mlp.parameters() if parameter is not mlp.unsummed_bias)]
    return [y.detach(), *torch.autograd.grad((y * torch.arange(y.numel()).view_as(y).sin()).sum(), wanted)]


def pair(flags: str, tiles: int, dtype: torch.dtype) -> tuple[MLP, MLP, torch.Tensor]:
    """An MLP, an MLP with the same weights in tiles (one: the activation is computed again), and an input."""
    torch.manual_seed(0)
    linears = Linears(tiny_config(flags).model)
    whole = MLP(linears).to(dtype)
    tiled = MLP(replace(linears, activation_again=True), tiles=tiles, recompute_activation=True).to(dtype)
    for parameter in whole.parameters():
        parameter.data.normal_(std=0.2)
    tiled.load_state_dict(whole.state_dict())
    return whole, tiled, torch.randn(TOKENS, WIDTH, dtype=dtype)


@every_pair(tiles=[1, 2, 4, 11, 100], bias=["", "--disable-bias-linear "], clamps=[False, True], name=list(FUNCTIONS))
def test_output_and_gradients_are_those_of_the_whole(name: str, clamps: bool, bias: str, tiles: int) -> None:
    of_gate = "--activation-func-clamp-value 0.7 --glu-linear-offset 0.3 " if clamps and name in GATES else ""
    whole, tiled, x = pair(flags_of(name) + of_gate + bias, tiles, torch.float64)
    for got, wanted in zip(trained(tiled, x), trained(whole, x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def test_sums_over_tiles_are_wide() -> None:
    """In 16 bits, sums of many tiles would lose what each adds."""
    whole, tiled, _ = pair("", 64, torch.bfloat16)
    x = torch.randn(64, WIDTH, dtype=torch.bfloat16)
    narrow = trained(whole, x)
    exact = trained(whole.double(), x.double())
    for got, other, wanted in zip(trained(tiled, x), narrow, exact, strict=True):
        assert (got.double() - wanted).norm() < 1.5 * (other.double() - wanted).norm()


@pytest.mark.parametrize("tiles", [1, 4])
def test_only_the_input_is_kept(tiles: int) -> None:
    """Of the tiles, or of the first product and the activation function."""
    _, tiled, x = pair("--swiglu ", tiles, torch.float64)
    own = {parameter.data_ptr() for parameter in tiled.parameters()}
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        tiled(x.requires_grad_())
    inputs = [x.shape] if tiles > 1 else [x.shape, (TOKENS, tiled.up.weight.flatten(0, -2).shape[0])]
    assert [tensor.shape for tensor in kept if tensor.data_ptr() not in own] == inputs
