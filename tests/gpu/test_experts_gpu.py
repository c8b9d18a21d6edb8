"""Experts on a GPU: the grouped kernel in bf16, with empty experts and without rows, computes what fp64 says."""

import pytest
import torch

from gptpar.model.block import make_experts
from gptpar.model.experts.dispatch import ALL_EXPERTS
from gptpar.model.experts.layer import Experts
from gptpar.model.experts.products import grouped_product
from gptpar.model.experts.routing import _Logits, no_choice
from gptpar.model.linear import Linears
from gptpar.system.determinism import deterministic
from tests.gpu.training import run
from tests.helpers import tiny_config

pytestmark = pytest.mark.gpu

DEVICE, LENGTH, TOKENS, WIDTH, NUM_EXPERTS, TOPK = "cuda", 32, 128, 64, 8, 2
TOLERANCE = 2e-2
"""Of L2 norms: products in bf16, whose operands differ from fp64's by up to 2^-9."""
FLAGS = (
    f"--num-experts {NUM_EXPERTS} --moe-router-topk {TOPK} --moe-ffn-hidden-size 48 --disable-bias-linear --swiglu "
    f"--seq-length {LENGTH} --hidden-size {WIDTH} --moe-router-load-balancing-type seq_aux_loss "
    "--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 "
)
BIASES = "with biases"
LOADS = {"as they come": {}, "two empty": {3: -10.0, 7: -10.0}, "all in two": {0: 10.0, 5: 10.0}}


def layer_of(dtype: torch.dtype, device: str, flags: str) -> Experts:
    torch.manual_seed(1)
    words = FLAGS.replace("--disable-bias-linear ", "") if flags == BIASES else FLAGS + flags
    layer = make_experts(Linears(tiny_config(words).model), ALL_EXPERTS).double()
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.2).copy_(parameter.data.bfloat16())
    return layer.to(device, dtype)


def outcome(
    layer: Experts, x_ND: torch.Tensor, choice_NK: torch.Tensor, *, compiled: bool = False
) -> list[torch.Tensor]:
    x_ND = x_ND.clone().requires_grad_()
    y_ND, losses = (torch.compile(layer) if compiled else layer)(x_ND, LENGTH, choice_NK)
    leaves = [x_ND, *layer.parameters()]
    found = torch.autograd.grad(
        [y_ND, *losses.values()], leaves, [y_ND.detach().cos(), *map(torch.ones_like, losses.values())]
    )
    return [y_ND.detach(), *losses.values(), *found]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens, width, experts", [(777, 2048, 64), (64, 4096, 128), (3, 520, 6)])
def test_logits_of_the_router_are_those_of_fp32(tokens: int, width: int, experts: int, compiled: bool) -> None:
    """Tensor cores cut sums off where others round. Gradients, in bf16, are nearest but where last bits decide."""
    torch.manual_seed(2)
    x, weight = (torch.randn(rows, width, device=DEVICE).bfloat16() for rows in (tokens, experts))
    leaves, grad = [x.requires_grad_(), weight.requires_grad_()], torch.randn(tokens, experts, device=DEVICE)
    logits = (torch.compile(_Logits.apply) if compiled else _Logits.apply)(*leaves)
    wanted = x.double() @ weight.double().t()
    assert logits.dtype == torch.float32 and (logits - wanted).norm() < 5e-6 * wanted.norm()
    for got, of in zip(
        torch.autograd.grad(logits, leaves, grad), torch.autograd.grad(wanted, leaves, grad.double()), strict=True
    ):
        assert (got == of).float().mean() > 0.99 and (got - of).norm() < 1e-3 * of.norm()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("flags", ["", "--moe-expert-capacity-factor 0.75", BIASES])
@pytest.mark.parametrize("loads", LOADS)
def test_bf16_computes_what_fp64_does(loads: str, flags: str, compiled: bool) -> None:
    """All take the experts that fp64 has chosen; experts without tokens have gradients of 0.

    Where the terms of a sum cancel, as in the router's bias, bf16 on the CPU differs more: so may the GPU.
    """
    wide, narrow = layer_of(torch.float64, "cpu", flags), layer_of(torch.bfloat16, DEVICE, flags)
    on_cpu = layer_of(torch.bfloat16, "cpu", flags)
    for layer in (wide, narrow, on_cpu):
        layer.router.bias_E = torch.zeros(NUM_EXPERTS, device=layer.up.device)
        for expert, bias in LOADS[loads].items():
            layer.router.bias_E[expert] = bias
    x_ND = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16()
    choice_NK = no_choice(TOKENS, TOPK, x_ND.device)
    wanted = outcome(wide, x_ND.double(), choice_NK)
    found = outcome(narrow, x_ND.to(DEVICE), choice_NK.to(DEVICE), compiled=compiled)
    for one, other, rounded in zip(found, wanted, outcome(on_cpu, x_ND, choice_NK), strict=True):
        usual = (rounded.double() - other).norm()
        assert (one.cpu().double() - other).norm() <= max(TOLERANCE * other.norm(), 1.1 * usual)
    names = [name for name, _ in narrow.named_parameters()]
    gradients = dict(zip(names, found[-len(names) :], strict=True))
    for expert in (expert for expert, bias in LOADS[loads].items() if bias < 0):
        assert not gradients["up"][expert].any() and not gradients["down"][expert].any()


def test_a_rank_without_rows_has_gradients_of_zero() -> None:
    weight_EOI = torch.randn(4, 32, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    x_MI = torch.zeros(0, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    y_MO = grouped_product(x_MI, weight_EOI, torch.zeros(4, dtype=torch.int64, device=DEVICE))
    of_x, of_weight = torch.autograd.grad(y_MO, [x_MI, weight_EOI], torch.zeros_like(y_MO))
    assert y_MO.shape == (0, 32) and of_x.shape == (0, 16) and not of_weight.any()


@pytest.mark.parametrize("more", ["", "--moe-expert-capacity-factor 0.75 ", "--no-compile "])
def test_a_step_as_one_graph_is_bit_identical(more: str) -> None:
    flags = FLAGS + "--seq-length 16 --moe-router-enable-expert-bias --bf16 --deterministic-mode " + more
    with deterministic(True):
        one_by_one, as_graph = run(DEVICE, flags + "--cuda-graph off"), run(DEVICE, flags + "--cuda-graph on")
    assert one_by_one[0] == as_graph[0] and torch.equal(one_by_one[1], as_graph[1])


def test_training_in_bf16_goes_as_in_fp64() -> None:
    flags = FLAGS + "--seq-length 16 --moe-router-enable-expert-bias --lr 1e-3 "
    narrow, wide = run(DEVICE, flags + "--bf16"), run("cpu", flags + "--fp64")
    assert narrow[0] == pytest.approx(wide[0], rel=1e-2)
