"""What the kernels compute, in torch's operators on a CPU, against autograd's gradients of the plain definitions."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from gptpar.kernels import plain_loss
from gptpar.kernels.bias_gradient import gelu, heads, split_heads, squared_relu
from gptpar.kernels.head_norm import HeadNorm, HeadShape, normed_heads
from gptpar.kernels.plain_loss import LossTerms
from gptpar.kernels.residual_norm import output_norm, residual_norm
from gptpar.model.activations import gated
from gptpar.model.rotary import Rotary, rotate
from tests.pairs import every_pair


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


Tensors = Sequence[torch.Tensor]


def assert_same(got: Tensors, wanted: Tensors) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def assert_differentiated(got: Tensors, wanted: Tensors, inputs: Tensors) -> None:
    """The same outputs, and the same gradients in all inputs."""
    assert_same(got, wanted)
    grads = [random(*part.shape, seed=10 + number).detach() for number, part in enumerate(wanted)]
    assert_same(torch.autograd.grad(got, inputs, grads), torch.autograd.grad(wanted, inputs, grads))


@pytest.mark.parametrize("activation", [gelu, squared_relu])
def test_a_bias_gets_its_gradient_from_an_activation(activation: Callable[..., torch.Tensor]) -> None:
    x, weight, bias = random(7, 5), random(9, 5, seed=1), random(9, seed=2)
    wanted = activation(F.linear(x, weight, bias), None)
    got = activation(F.linear(x, weight, bias.detach()), bias)
    assert_differentiated([got], [wanted], [x, weight, bias])


def test_swiglu_is_the_product_of_its_halves() -> None:
    up = random(7, 10)
    gate, value = up.chunk(2, dim=-1)
    assert_differentiated([gated("swiglu", up)], [gate * torch.sigmoid(gate) * value], [up])


@pytest.mark.parametrize("queries", [1, 3])
def test_a_bias_gets_its_gradient_from_the_heads(queries: int) -> None:
    batch, seq_length, groups, width = 2, 6, 2, 4
    columns, shape = groups * (queries + 2) * width, (seq_length, queries, width)
    x, weight, bias = random(batch * seq_length, 5), random(columns, 5, seed=1), random(columns, seed=2)
    wanted = heads(F.linear(x, weight, bias), *shape)
    assert_differentiated(split_heads(F.linear(x, weight, bias.detach()), bias, *shape), wanted, [x, weight, bias])


@pytest.mark.parametrize("adds", [False, True])
def test_the_stream_meets_itself_behind_a_norm(adds: bool) -> None:
    x, y, added_bias = random(7, 5), random(7, 5, seed=1), random(5, seed=4)
    norm = random(5, seed=2), random(5, seed=3)
    total = x + (y + added_bias) if adds else x * 1
    wanted = total, F.layer_norm(total, (5,), *norm, 1e-5)
    added = (y + added_bias.detach(), added_bias) if adds else (None, None)
    assert_differentiated(residual_norm(x, *added, *norm, 1e-5), wanted, [x, *norm, *[y, added_bias] * adds])


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_norm_behind_a_layer_sums_the_layers_bias(has_bias: bool) -> None:
    x, bias = random(7, 5), random(5, seed=3)
    norm = random(5, seed=1), random(5, seed=2)
    wanted = F.layer_norm(x + bias if has_bias else x, (5,), *norm, 1e-5)
    given = (x + bias.detach(), bias) if has_bias else (x, None)
    assert_differentiated([output_norm(*given, *norm, 1e-5)], [wanted], [x, *norm, *[bias] * has_bias])


def plain_heads(
    qkv: torch.Tensor, norms: tuple[HeadNorm, HeadNorm], shape: HeadShape, eps: float
) -> tuple[torch.Tensor, ...]:
    """What :func:`normed_heads` returns, one head at a time."""
    found: list[list[torch.Tensor]] = [[], [], [], []]
    for group in qkv.split((shape.queries * (1 + shape.gated) + 2) * shape.width, dim=1):
        for n, head in enumerate(group.split(shape.width, dim=1)):
            kind = (n >= shape.queries) + (n > shape.queries) + (n > shape.queries + 1)
            if kind < 2:
                factor, bias = norms[kind]
                centred = head if bias is None else head - head.mean(1, keepdim=True)
                head = centred / (centred.square().mean(1, keepdim=True) + eps).sqrt() * factor
                head = head if bias is None else head + bias
            found[kind].append(head.unflatten(0, (-1, shape.seq_length)))
    return tuple(torch.stack(some, dim=1) for some in found if some)


@every_pair(
    normalization=["LayerNorm", "RMSNorm"],
    queries=[1, 3],
    gated=[False, True],
    rotated=[0, 4],
    has_bias=[False, True],
    from_one=[False, True],
)
def test_norms_of_heads_form_all_gradients(
    normalization: str, queries: int, gated: bool, rotated: int, has_bias: bool, from_one: bool
) -> None:
    shape, groups = HeadShape(seq_length=5, queries=queries, width=6, gated=gated), 2
    columns = groups * (queries * (1 + gated) + 2) * 6
    qkv, layer_bias = random(3 * 5, columns), random(columns, seed=1)
    vectors = [random(6, seed=n) for n in (2, 3, 4, 5)]
    centred = normalization == "LayerNorm"
    norms = [
        HeadNorm(factor + 1 if from_one else factor, bias if centred else None)
        for factor, bias in (vectors[:2], vectors[2:])
    ]
    inputs = [qkv, *(vectors if centred else vectors[::2])] + [layer_bias] * has_bias

    def turned(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (*rotate(parts[:2], None, Rotary(rotated, 10000)), *parts[2:]) if rotated else parts

    wanted = turned(plain_heads(qkv + layer_bias if has_bias else qkv, (norms[0], norms[1]), shape, 1e-5))
    given = qkv + layer_bias.detach() if has_bias else qkv
    parts = normed_heads(given, layer_bias if has_bias else None, norms[0], norms[1], shape, 1e-5)
    for part in parts[:2]:
        assert part.transpose(1, 2).is_contiguous()  # token by token: so attention writes its output
    assert_differentiated(turned(parts), wanted, inputs)


@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(3.0), LossTerms(0.0, 0.1), LossTerms(3.0, 0.1)], ids=str)
@pytest.mark.parametrize("padding", [1.0, 1e4, float("inf")])
def test_loss_and_gradient_whole_and_in_shares(terms: LossTerms, padding: float) -> None:
    """Whatever stands in 8 columns that pad 10; of shares, one has 4 of 6 valid columns, and one none."""
    logits, labels, weights = random(6, 10), torch.tensor([0, 9, 4, 5, 3, 7]), random(6, seed=1).detach().abs()
    scale, softcap = torch.tensor(8.0, dtype=torch.float64), terms.softcap
    entering = softcap * torch.tanh(logits / softcap) if softcap else logits
    lse = torch.logsumexp(entering, -1)
    losses = F.cross_entropy(entering, labels, reduction="none") + terms.z_weight * lse**2
    wanted_loss = (losses * weights).sum()
    (wanted,) = torch.autograd.grad(wanted_loss * scale, logits)
    padded = torch.cat([logits.detach(), torch.full((6, 8), padding, dtype=torch.float64)], 1)
    loss, grad = plain_loss.loss_and_grad(logits.detach(), labels, weights, scale, terms)
    assert_same((loss, grad), (wanted_loss.detach(), wanted))
    same_loss, padded_grad = plain_loss.loss_and_grad(padded, labels, weights, scale, terms, 10)
    assert torch.equal(same_loss, loss) and torch.equal(padded_grad, F.pad(grad, (0, 8)))

    shares = [(padded[:, i : i + 6], labels - i, max(0, min(6, 10 - i))) for i in (0, 6, 12)]
    maxima, sums, own = zip(*(plain_loss.local_statistics(x, y, softcap, valid) for x, y, valid in shares), strict=True)
    maximum = torch.stack(maxima).amax(0)
    lse = sum(s * (m - maximum).exp() for s, m in zip(sums, maxima, strict=True)).log() + maximum
    assert_same((plain_loss.token_losses(lse, sum(own), terms),), (losses.detach(),))
    parts = [plain_loss.local_grad(x, y, lse, weights, scale, terms, valid) for x, y, valid in shares]
    assert_same((torch.cat(parts, 1),), (F.pad(wanted, (0, 8)),))
