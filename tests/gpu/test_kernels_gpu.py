"""Triton kernels against the same in torch's operators, with shapes that do not fill whole tiles."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import inf

import pytest
import torch
import torch.nn.functional as F

from gptpar.kernels import gpu, plain_loss
from gptpar.kernels.addition import MIN_ELEMENTS, add, add_each
from gptpar.kernels.bias_gradient import gelu, heads, split_heads, squared_relu
from gptpar.kernels.head_norm import HeadNorm, HeadShape, normed_heads
from gptpar.kernels.plain_loss import LossTerms
from gptpar.kernels.residual_norm import output_norm, residual_norm
from gptpar.model.activations import FUNCTIONS, _plain, activated, backward_again, gated
from gptpar.model.experts.products import Places, combined, places_of, scattered
from gptpar.model.rotary import Rotary, rotate

pytestmark = pytest.mark.gpu

# The result's rounding, and fp32 sums in another order.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-5}}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


@DTYPES
@pytest.mark.parametrize("shape", [(7, 100), (300, 50304), (64, 12576)])
@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(20.0, 0.0), LossTerms(0.0, 1e-2), LossTerms(5.0, 1e-2)])
def test_loss_kernels_equal_torch(dtype: torch.dtype, shape: tuple[int, int], terms: LossTerms) -> None:
    logits = random(*shape, dtype=dtype) * 4
    labels = torch.randint(shape[1], shape[:1], device="cuda")
    weights, scale = torch.rand(shape[0], device="cuda"), torch.tensor(1024.0, device="cuda")
    loss, grad = gpu.loss.loss_and_grad(logits.clone(), labels, weights, scale, terms)
    wide = (logits.double(), labels, weights.double(), scale.double())  # fp32 would round near the cap as often
    wanted_loss, wanted_grad = plain_loss.loss_and_grad(*wide, terms)
    torch.testing.assert_close(loss.double(), wanted_loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(grad.double(), wanted_grad, **TOLERANCE[dtype])

    labels -= shape[1] // 2  # half of them belong to another rank
    got, wanted = (k.local_statistics(logits, labels, terms.softcap) for k in (gpu.loss, plain_loss))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    lse = wanted[1].log() + wanted[0]
    got_grad = gpu.loss.local_grad(logits.clone(), labels, lse, weights, scale, terms)
    wanted_grad = plain_loss.local_grad(logits, labels, lse, weights, scale, terms)
    torch.testing.assert_close(got_grad, wanted_grad, **TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("columns, valid", [(128, 98), (50304, 50257), (16384, 8000), (12576, 1), (12576, 0)])
@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(20.0, 0.0), LossTerms(0.0, 1e-2), LossTerms(5.0, 1e-2)])
def test_loss_kernels_leave_padding_out(dtype: torch.dtype, columns: int, valid: int, terms: LossTerms) -> None:
    """Padding has the largest logits, so that it would decide every sum; without valid columns nothing is NaN."""
    logits = random(64, columns, dtype=dtype) * 4
    logits[:, valid:] = 60.0
    labels = torch.randint(max(valid, 1), (64,), device="cuda") if valid else torch.full((64,), -1, device="cuda")
    weights, scale = torch.rand(64, device="cuda"), torch.tensor(1.0, device="cuda")
    got, wanted = (k.local_statistics(logits, labels, terms.softcap, valid) for k in (gpu.loss, plain_loss))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    lse = wanted[1].log() + wanted[0] if valid else torch.full((64,), 3.0, device="cuda")
    got_grad = gpu.loss.local_grad(logits.clone(), labels, lse, weights, scale, terms, valid)
    wanted_grad = plain_loss.local_grad(logits, labels, lse, weights, scale, terms, valid)
    torch.testing.assert_close(got_grad, wanted_grad, **TOLERANCE[dtype])
    assert not got_grad[:, valid:].any()
    if valid:
        loss, grad = gpu.loss.loss_and_grad(logits.clone(), labels, weights, scale, terms, valid)
        wide = (logits.double(), labels, weights.double(), scale.double())
        wanted_loss, wanted_grad = plain_loss.loss_and_grad(*wide, terms, valid)
        torch.testing.assert_close(loss.double(), wanted_loss, rtol=1e-5, atol=1e-5)  # of one valid column it is zero
        torch.testing.assert_close(grad.double(), wanted_grad, **TOLERANCE[dtype])
        assert not grad[:, valid:].any()


@DTYPES
@pytest.mark.parametrize("activation", [gelu, squared_relu])
@pytest.mark.parametrize("shape", [(3, 40), (1000, 4096), (16384, 768)])
def test_activations_with_bias_gradient_equal_torch(
    dtype: torch.dtype, activation: Callable[..., torch.Tensor], shape: tuple[int, int]
) -> None:
    x, grad = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    bias = torch.zeros(shape[1], dtype=dtype, device="cuda", requires_grad=True)
    x.requires_grad_()
    got = torch.autograd.grad(activation(x, bias), (x, bias), grad)
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(activation(wide, None), wide, grad.double())
    torch.testing.assert_close(got[0].double(), wanted, **TOLERANCE[dtype])
    torch.testing.assert_close(got[1].double(), got[0].double().sum(0), rtol=TOLERANCE[dtype]["rtol"], atol=1e-3)


@DTYPES
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(3, 40), (1000, 4096), (257, 2730)])
def test_swiglu_equals_torch(dtype: torch.dtype, compiled: bool, shape: tuple[int, int]) -> None:
    up = random(shape[0], 2 * shape[1], dtype=dtype).mul(3).requires_grad_()
    grad = random(*shape, dtype=dtype, seed=1)
    swiglu = partial(gated, "swiglu")
    y = (torch.compile(swiglu) if compiled else swiglu)(up)
    (got,) = torch.autograd.grad(y, up, grad)
    wide = up.detach().double().requires_grad_()
    wanted = swiglu(wide)
    torch.testing.assert_close(y.detach().double(), wanted.detach(), **TOLERANCE[dtype])
    torch.testing.assert_close(got.double(), torch.autograd.grad(wanted, wide, grad.double())[0], **TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("gates", [(inf, 0.0), (1.5, 0.3), None], ids=["gate", "clamped gate", "function"])
@pytest.mark.parametrize("shape", [(3, 40), (257, 2730)])
def test_activations_computed_again_equal_torch(
    dtype: torch.dtype, name: str, gates: tuple[float, float] | None, shape: tuple[int, int]
) -> None:
    """The gradient, the output that is computed again beside it, and the output: the last two to the bit."""
    how = (name, gates is not None, *(gates or (inf, 0.0)))
    up, grad = random(shape[0], shape[1] * (1 + how[1]), dtype=dtype).mul(3), random(*shape, dtype=dtype, seed=1)
    wide, inner, again = up.double().requires_grad_(), activated(up, *how), grad.clone()
    grad_up, wanted = backward_again(again, up, *how), _plain(wide, *how)
    assert torch.equal(again, inner)
    torch.testing.assert_close(inner.double(), wanted.detach(), **TOLERANCE[dtype])
    (wanted,) = torch.autograd.grad(wanted, wide, grad.double())
    torch.testing.assert_close(grad_up.double(), wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["swiglu", "quick_geglu", "gelu_tanh", "squared_relu"])
def test_activations_pass_on_what_is_not_finite(name: str) -> None:
    """An overflow must reach the gradients' norm, also through bounds of gates."""
    up, grad = torch.full((2, 64), torch.nan, device="cuda"), torch.ones(2, 32, device="cuda")
    grad_up = backward_again(grad, up, name, True, 7.0, 1.0)
    assert grad_up.isnan().all() and grad.isnan().all()


@DTYPES
@pytest.mark.parametrize("batch, seq_length, groups, queries, width", [(2, 33, 3, 1, 40), (4, 256, 2, 3, 64)])
def test_merged_heads_equal_torch(
    dtype: torch.dtype, batch: int, seq_length: int, groups: int, queries: int, width: int
) -> None:
    columns = groups * (queries + 2) * width
    qkv = random(batch * seq_length, columns, dtype=dtype).requires_grad_()
    bias = torch.zeros(columns, dtype=dtype, device="cuda", requires_grad=True)
    parts = split_heads(qkv, bias, seq_length, queries, width)
    plain = qkv.detach().clone().requires_grad_()
    grads = [random(*part.shape, dtype=dtype, seed=n) for n, part in enumerate(parts)]
    grads[1] = grads[1].transpose(1, 2).contiguous().transpose(1, 2)  # as attention kernels lay them out
    got, got_bias = torch.autograd.grad(parts, (qkv, bias), grads)
    (wanted,) = torch.autograd.grad(heads(plain, seq_length, queries, width), plain, grads)
    assert torch.equal(got, wanted)
    torch.testing.assert_close(got_bias.double(), wanted.double().sum(0), rtol=TOLERANCE[dtype]["rtol"], atol=1e-3)


def assert_norms_gradients(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Of the input, and of vectors, which are sums over its rows."""
    rtol = TOLERANCE[dtype]["rtol"]
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=rtol, atol=1e-2 if dtype.itemsize == 2 else 1e-5)
    for mine, theirs in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=1e-3)


@DTYPES
@pytest.mark.parametrize("shape, adds", [((5, 40), False), ((1000, 1024), True), ((777, 2560), True)])
def test_residual_norm_equals_torch(dtype: torch.dtype, shape: tuple[int, int], adds: bool) -> None:
    x = random(*shape, dtype=dtype).requires_grad_()
    added = random(*shape, dtype=dtype, seed=1).requires_grad_() if adds else None
    vectors = [random(shape[1], dtype=dtype, seed=n).requires_grad_() for n in (2, 3, 4)]
    grads = [random(*shape, dtype=dtype, seed=n) for n in (5, 6)]
    inputs = [x, *vectors[:2]] + ([added, vectors[2]] if adds else [])
    outputs = residual_norm(x, added, vectors[2] if adds else None, *vectors[:2], 1e-5)
    got = torch.autograd.grad(outputs, inputs, grads)

    total = outputs[0].detach().double().requires_grad_()
    wide = [vector.detach().double().requires_grad_() for vector in vectors[:2]]
    normed = F.layer_norm(total, shape[1:], *wide, 1e-5)
    torch.testing.assert_close(outputs[1].double(), normed, **TOLERANCE[dtype])
    wanted = torch.autograd.grad((total, normed), [total, *wide], [grad.double() for grad in grads])
    assert_norms_gradients(got[:3], wanted, dtype)
    if adds:
        assert torch.equal(got[3], got[0])
        torch.testing.assert_close(got[4].double(), got[0].double().sum(0), rtol=TOLERANCE[dtype]["rtol"], atol=1e-3)


@DTYPES
@pytest.mark.parametrize("shape", [(5, 40), (777, 2560), (9, 8200)])  # the last is wider than the kernel takes
def test_output_norm_equals_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(*shape, dtype=dtype).requires_grad_()
    weight, bias, layer_bias = (random(shape[1], dtype=dtype, seed=n).requires_grad_() for n in (1, 2, 3))
    grad = random(*shape, dtype=dtype, seed=4)
    normed = output_norm(x, layer_bias, weight, bias, 1e-5)
    got = torch.autograd.grad(normed, (x, weight, bias, layer_bias), grad)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    expected = F.layer_norm(wide[0], shape[1:], wide[1], wide[2], 1e-5)
    torch.testing.assert_close(normed.double(), expected, **TOLERANCE[dtype])
    wanted = torch.autograd.grad(expected, wide, grad.double())
    assert_norms_gradients(got, (*wanted, got[0].double().sum(0)), dtype)


def head_norm_inputs(
    tokens: int, groups: int, shape: HeadShape, centred: bool, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The projection's output, its bias, weight and bias of both norms."""
    columns = groups * (shape.queries * (1 + shape.gated) + 2) * shape.width
    vectors = [random(shape.width, dtype=dtype, seed=n).requires_grad_() for n in range(2, 6)]
    qkv, bias = random(tokens, columns, dtype=dtype).requires_grad_(), random(columns, dtype=dtype, seed=1)
    return [qkv, bias.requires_grad_(), *(vectors if centred else vectors[::2])]


def normed(inputs: list[torch.Tensor], shape: HeadShape) -> tuple[torch.Tensor, ...]:
    qkv, bias, *vectors = inputs
    centred = len(vectors) == 4
    norms = [HeadNorm(v[0], v[1] if centred else None) for v in (vectors[: 1 + centred], vectors[1 + centred :])]
    return normed_heads(qkv, bias, norms[0], norms[1], shape, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("start", [0, 1, 64])
def test_gradients_are_added_as_torch_adds_them(dtype: torch.dtype, start: int) -> None:
    """Whatever the alignment; the numbers are small enough for denormal sums."""
    length, small = MIN_ELEMENTS + 77, torch.finfo(dtype).tiny
    flat = torch.randn(start + length, device="cuda") * small
    total, addend = flat[start:], (torch.randn(length, device="cuda") * small).to(dtype)
    wanted = total + addend
    add_each([total, total[:9]], [addend, torch.zeros(9, device="cuda")], 1.0)
    assert torch.equal(total, wanted) and torch.equal(flat[start:], wanted)
    add_each([total], [addend], 0.25)
    assert torch.equal(total, wanted + 0.25 * addend.float())
    square, other = torch.zeros(1024, 1024, device="cuda").t(), torch.randn(1024, 1024, device="cuda").to(dtype)
    add_each([square], [other], 1.0)
    assert torch.equal(square, other.float())


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("dtypes", product([torch.bfloat16, torch.float32], repeat=2), ids=str)
def test_sums_are_rounded_once(dtypes: tuple[torch.dtype, torch.dtype], start: int) -> None:
    a, b = random(5001, dtype=dtypes[0])[start:], random(5001, dtype=torch.bfloat16, seed=1)[start:]
    wanted = (a.float() + b.float()).to(dtypes[1])
    for total in [torch.empty_like(wanted), *(x for x in (a.clone(), b.clone()) if x.dtype == dtypes[1])]:
        add(a, b, total)
        assert torch.equal(total, wanted)
    if dtypes[0] == dtypes[1]:
        add(a, b, a)
        assert torch.equal(a, wanted)


@DTYPES
@pytest.mark.parametrize("has_none", [False, True], ids=["", "some without an expert"])
@pytest.mark.parametrize("tokens, copies, width", [(37, 1, 256), (300, 8, 2048), (65, 4, 2880), (9, 3, 5000)])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_copies_of_tokens_equal_torchs(
    dtype: torch.dtype, has_none: bool, tokens: int, copies: int, width: int, compiled: bool
) -> None:
    """On the CPU, torch moves the rows."""
    chosen = torch.randint(7 + has_none, (tokens, copies), device="cuda")
    x, grad = random(tokens, width, dtype=dtype), random(tokens, width, dtype=dtype, seed=1)
    weights = torch.rand(tokens, copies, device="cuda")

    def forward(x: torch.Tensor, weights: torch.Tensor, places: Places) -> torch.Tensor:
        rows = scattered(x, places)
        factors = torch.arange(len(rows), device=x.device) % 5 - 2
        return combined(rows * factors[:, None], weights, places)

    results = []
    for device in ("cuda", "cpu"):
        inputs = [t.detach().to(device).requires_grad_() for t in (x, weights)]
        places = places_of(chosen.to(device), 7, has_none=has_none)
        run = torch.compile(forward) if compiled and device == "cuda" else forward
        y = run(*inputs, places)
        results.append([t.cpu() for t in (y, *torch.autograd.grad(y, inputs, grad.to(device)))])
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE[dtype]["rtol"], atol=TOLERANCE[dtype]["rtol"] * 30)


@DTYPES
@pytest.mark.parametrize("centred", [False, True], ids=["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
@pytest.mark.parametrize(
    "batch, seq_length, groups, queries, width",
    [(2, 33, 3, 1, 64), (3, 77, 2, 3, 80), (1, 1255, 4, 2, 128), (1, 2048, 1, 1, 128), (2, 9, 2, 1, 1100)],
)
def test_norms_of_heads_equal_torch(
    dtype: torch.dtype, centred: bool, gated: bool, batch: int, seq_length: int, groups: int, queries: int, width: int
) -> None:
    shape = HeadShape(seq_length, queries, width, gated)
    inputs = head_norm_inputs(batch * seq_length, groups, shape, centred, dtype)
    outputs = normed(inputs, shape)
    grads = [random(*part.shape, dtype=dtype, seed=6 + n) for n, part in enumerate(outputs)]
    grads[1] = grads[1].transpose(1, 2).contiguous().transpose(1, 2)  # as attention kernels lay them out
    got = torch.autograd.grad(outputs, inputs, grads)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]  # in 64 bits, in torch's operators
    expected = normed(wide, shape)
    wanted = torch.autograd.grad(expected, wide, [grad.double() for grad in grads])
    for part, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(part.double(), theirs, **TOLERANCE[dtype])
    assert_norms_gradients(got, (wanted[0], got[0].double().sum(0), *wanted[2:]), dtype)


def test_compiled_norms_of_heads_equal_eager_ones() -> None:
    """The gradients' layouts are then the compiler's: rotary positions turn the heads after the norms."""
    shape = HeadShape(33, 2, 64, True)
    inputs = head_norm_inputs(2 * 33, 3, shape, True, torch.float32)

    def turned(*inputs: torch.Tensor) -> torch.Tensor:
        q, k, v, gate = normed(list(inputs), shape)
        q, k = rotate((q, k), None, Rotary(32, 10000))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) * gate.sigmoid()

    eager, compiled = turned(*inputs), torch.compile(turned, fullgraph=True)(*inputs)
    grad = random(*eager.shape, dtype=torch.float32, seed=9)
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(*(torch.autograd.grad(y, inputs, grad) for y in (compiled, eager)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
