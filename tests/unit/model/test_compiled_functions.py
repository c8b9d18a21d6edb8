"""Functions with their own backward pass, compiled: every gradient is the one that they have uncompiled.

torch may compile a function without its gradients, and report no error (:class:`gptpar.tensor_parallel.axis.Collective`
says when). So each function is tried here, whichever compiled code reaches it.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.library import CustomOpDef

import gptpar
from gptpar.kernels.bias_gradient import gelu, split_heads, squared_relu
from gptpar.kernels.head_norm import HeadNorm, HeadShape, normed_heads
from gptpar.kernels.residual_norm import output_norm, residual_norm
from gptpar.model import attention_sinks
from gptpar.model.activated_product import activated_row
from gptpar.model.activations import gated
from gptpar.model.attention_sinks import varlen_attention_with_sinks
from gptpar.model.experts import products
from gptpar.model.experts.dispatch import _Repeated
from gptpar.model.experts.products import added, combined, places_of, scattered, with_biases
from gptpar.model.experts.routing import _Logits
from gptpar.model.mlp_tiles import tiled_mlp
from gptpar.tensor_parallel.axis import Collective, all_reduce, all_to_all
from gptpar.tensor_parallel.cross_entropy import LinearCrossEntropy
from gptpar.tensor_parallel.linear_ops import column_forward, row_forward, sum_over_ranks
from gptpar.tensor_parallel.products import PLAIN
from tests.unit.model.plain_attention import LENGTH, flash, flash_backward

ROOT = Path(gptpar.__file__).parents[1]
Tensors = tuple[torch.Tensor, ...]
TOKENS, WIDTH, FEATURES, EXPERTS = 6, 8, 10, 3
CHOSEN_NK = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0], [3, 2]])
"""Experts of each token; 3 is none."""
PLACES = places_of(CHOSEN_NK, EXPERTS, has_none=True)
ROWS = CHOSEN_NK.numel()
HOW = False, False, PLAIN
NEVER_COMPILED = {
    "context_parallel._GatheredAgain": "attend_by_gathering is not compiled",
    "model.experts.exchange._Arrived": "messages between ranks are not compiled",
    "model.experts.exchange._CameBack": "messages between ranks are not compiled",
    "model.experts.exchange._Send": "messages between ranks are not compiled",
    "model.experts.exchange._SendBack": "messages between ranks are not compiled",
    "pipeline.auxiliary_losses._Attached": "is called around a layer, and blocks alone are compiled",
    "pipeline.runtime._Entrance": "is called before the first layer",
}


def with_collectives(x: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    for there, back in ((all_reduce, None), (None, all_reduce), (all_to_all, all_to_all)):  # torch compiles no others
        x = Collective.apply(x, group, there, back).sin()
    return x


def through_group(split: CustomOpDef, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return split(x, weight, None, dist.group.WORLD.group_name, *HOW)


def added_to_sum(
    linear: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    return linear(x, weight, bias, "", *HOW, total.detach(), total.new_zeros((), requires_grad=True))


def of_gate(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *more: Any) -> torch.Tensor:
    return activated_row(x, weight, bias, "swiglu", True, 0.8, 0.1, *more)


def with_loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    labels, weights = torch.arange(len(hidden)), hidden.new_full((len(hidden),), 1 / len(hidden)).to(torch.float32)
    return LinearCrossEntropy.apply(hidden, weight, labels, weights, hidden.new_ones((), dtype=torch.float32))


def with_tiles(x: torch.Tensor, up: torch.Tensor, bias: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    plain = tiled_mlp(x, up, bias, down, "gelu_tanh", False, inf, 0.0, 2, "", *HOW)
    return plain + tiled_mlp(x, up, None, down[:, : FEATURES // 2], "swiglu", True, inf, 0.0, 2, "", *HOW)


def with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    starts = torch.tensor([0, 5, LENGTH], dtype=torch.int32)
    return varlen_attention_with_sinks(q, k, v, sinks, starts, starts, LENGTH, LENGTH, -1, 0.3)[0]


def in_fp64(kernel: Callable[..., Tensors], tensors: Tensors, *how: Any) -> Tensors:
    """What a kernel returns: numbers of the queries' format, or fp32 or wider where they are sums over a sequence."""
    narrow, wide = tensors[0].dtype, torch.promote_types(tensors[0].dtype, torch.float32)
    found = kernel([x.double() if x.is_floating_point() else x for x in tensors], *how)
    return tuple(x.to(narrow if x.dim() == 3 else wide) for x in found)


def sums_of_rows(x_MO: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """As the GPU's kernel, it does not wait for the counts."""
    ends_E1, rows_M = counts_E.cumsum(0)[:, None], torch.arange(len(x_MO))
    return ((rows_M < ends_E1) & (rows_M >= ends_E1 - counts_E[:, None])).to(x_MO.dtype) @ x_MO


def norms_of_heads(qkv: torch.Tensor, bias: torch.Tensor, *norms: torch.Tensor) -> Tensors:
    pairs = HeadNorm(norms[0], norms[1]), HeadNorm(norms[2], norms[3])
    return normed_heads(qkv, bias, *pairs, HeadShape(seq_length=3, queries=2, width=4, gated=True), 1e-5)


X, W, F1, D1 = (TOKENS, WIDTH), (FEATURES, WIDTH), (FEATURES,), (WIDTH,)
FUNCTIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "kernels.bias_gradient._Gelu": (gelu, [X, D1]),
    "kernels.bias_gradient._SplitHeads": (partial(split_heads, seq_length=3, queries=2, width=2), [X, D1]),
    "kernels.bias_gradient._SquaredRelu": (squared_relu, [X, D1]),
    "kernels.head_norm._HeadNorms": (norms_of_heads, [(TOKENS, 24), (24,), (4,), (4,), (4,), (4,)]),
    "kernels.residual_norm._OutputNorm": (partial(output_norm, eps=1e-5), [X, D1, D1, D1]),
    "kernels.residual_norm._ResidualNorm": (partial(residual_norm, eps=1e-5), [X, X, D1, D1, D1]),
    "model.activated_product.activated_row": (
        lambda *x: added_to_sum(of_gate, *x) + of_gate(x[0], *x[3:], None, "", *HOW),
        [X, (FEATURES, WIDTH // 2), F1, (FEATURES, WIDTH // 2)],
    ),
    "model.activations._Swiglu": (partial(gated, "swiglu"), [X]),
    "model.attention_sinks.varlen_attention_with_sinks": (
        with_sinks,
        [(LENGTH, 4, WIDTH), (LENGTH, 2, WIDTH), (LENGTH, 2, WIDTH), (4,)],
    ),
    "model.experts.dispatch._Repeated": (lambda x: _Repeated.apply(x, 3), [X]),
    "model.experts.products._Added": (lambda own, y: added(y, PLACES, own), [X, (ROWS, WIDTH)]),
    "model.experts.products._Biased": (
        lambda y, bias: with_biases(y, bias, PLACES.counts_E),
        [(ROWS, WIDTH), (EXPERTS, WIDTH)],
    ),
    "model.experts.products._Combined": (lambda y, w: combined(y, w, PLACES), [(ROWS, WIDTH), (TOKENS, 2)]),
    "model.experts.products._Scattered": (lambda x: scattered(x, PLACES), [X]),
    "model.experts.routing._Logits": (_Logits.apply, [X, (EXPERTS, WIDTH)]),
    "model.mlp_tiles.tiled_mlp": (with_tiles, [X, W, F1, (WIDTH, FEATURES)]),
    "tensor_parallel.axis.Collective": (with_collectives, [X]),
    "tensor_parallel.cross_entropy.LinearCrossEntropy": (with_loss, [X, W]),
    "tensor_parallel.linear_ops.column_forward": (partial(through_group, column_forward), [X, W]),
    "tensor_parallel.linear_ops.row_forward": (
        lambda *x: added_to_sum(row_forward, *x) + through_group(row_forward, x[0], x[3]),
        [X, W, F1, W],
    ),
    "tensor_parallel.linear_ops.sum_over_ranks": (lambda x: sum_over_ranks(x, dist.group.WORLD.group_name), [X]),
}
"""Each function that gptpar defines: a function that calls it, and the shapes of its arguments."""


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def functions_with_backward() -> set[str]:
    """All of gptpar's, as ``module.name``."""
    found = set()
    for file in sorted(ROOT.glob("gptpar/**/*.py")):
        text = file.read_text()
        if any(sign in text for sign in ("autograd.Function)", "register_autograd(", "with_backward(")):
            module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
            for name, one in vars(module).items():
                is_function = isinstance(one, type) and issubclass(one, torch.autograd.Function)
                has_own = is_function or (isinstance(one, CustomOpDef) and one._backward_fn is not None)
                if has_own and (one.__module__ if is_function else one._init_fn.__module__) == module.__name__:
                    found.add(f"{module.__name__.removeprefix('gptpar.')}.{name}")
    return found


def test_every_function_has_a_row() -> None:
    assert functions_with_backward() == FUNCTIONS.keys() | NEVER_COMPILED.keys()


def gradients(call: Callable[..., Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    found = call(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    return [
        *(y.detach() for y in outputs),
        *torch.autograd.grad([y.double().cos().sum() for y in outputs], leaves, materialize_grads=True),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[pytest.mark.slow] * (one != "tensor_parallel.axis.Collective")) for one in FUNCTIONS],
)
def test_compiled_gradients_are_those_of_uncompiled_code(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_sinks, "_flash", lambda *x: in_fp64(lambda y, *how: flash(*y, *how), x[:5], *x[5:]))
    monkeypatch.setattr(attention_sinks, "_flash_backward", partial(in_fp64, flash_backward))
    monkeypatch.setattr(products, "_sums_of_rows", sums_of_rows)
    (call, shapes), generator = FUNCTIONS[name], torch.Generator().manual_seed(1)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]

    def inside(*inputs: torch.Tensor) -> Any:
        """Compiled code computes arguments and reads results."""
        found = call(*(x * 2 for x in inputs))
        return tuple(y.sin() for y in found) if isinstance(found, tuple) else found.sin()

    wanted = gradients(inside, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(inside, backend="aot_eager", fullgraph=True)
    few_ulps = 8 * torch.finfo(dtype).eps
    for got, one in zip(gradients(compiled, inputs), wanted, strict=True):
        torch.testing.assert_close(got, one, rtol=few_ulps, atol=few_ulps)


def test_attention_with_sinks_has_the_strides_that_it_announces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its operands: of one sample, heads lie apart. torch's kernel allocates alike."""
    monkeypatch.setattr(attention_sinks, "_flash", lambda q, *_: (torch.zeros_like(q), torch.zeros(q.shape[1], len(q))))
    monkeypatch.setattr(attention_sinks, "_flash_backward", lambda t, *_: tuple(map(torch.zeros_like, t[1:4])))
    q, k, v = (torch.randn(heads, 6, 8).transpose(0, 1) for heads in (4, 2, 2))
    starts, how = torch.tensor([0, 6], dtype=torch.int32), (6, 6, -1, 0.3)
    given = q, k, v, torch.randn(4), starts, starts, *how
    torch.library.opcheck(attention_sinks.varlen_attention_with_sinks, given, test_utils="test_faketensor")
    y, total = attention_sinks.varlen_attention_with_sinks(*given)
    backward = y.contiguous(), q, k, v, y, total, starts, starts, *how
    torch.library.opcheck(attention_sinks.varlen_attention_with_sinks_backward, backward, test_utils="test_faketensor")
