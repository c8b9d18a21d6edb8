"""What the kernels compute, in torch's operators on a CPU, against autograd's gradients of the plain definitions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gptpar.kernels import plain_loss
from gptpar.kernels.bias_gradient import gelu, heads, split_heads
from gptpar.kernels.plain_loss import LossTerms
from gptpar.kernels.residual_norm import residual_norm


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def assert_same(got: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_bias_gets_its_gradient_from_gelu() -> None:
    x, weight, bias, grad = random(7, 5), random(9, 5, seed=1), random(9, seed=2), random(7, 9, seed=3).detach()
    inputs = (x, weight, bias)
    wanted = torch.autograd.grad(F.gelu(F.linear(x, weight, bias), approximate="tanh"), inputs, grad)
    assert_same(torch.autograd.grad(gelu(F.linear(x, weight, bias.detach()), bias), inputs, grad), wanted)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_bias_gets_its_gradient_from_the_heads(queries: int) -> None:
    batch, seq_length, groups, width = 2, 6, 2, 4
    columns = groups * (queries + 2) * width
    x, weight, bias = random(batch * seq_length, 5), random(columns, 5, seed=1), random(columns, seed=2)
    inputs, shape = (x, weight, bias), (seq_length, queries, width)

    def attend(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=queries > 1)

    grad = random(batch, groups * queries, seq_length, width, seed=3).detach()
    wanted = torch.autograd.grad(attend(heads(F.linear(x, weight, bias), *shape)), inputs, grad)
    given = split_heads(F.linear(x, weight, bias.detach()), bias, *shape)
    assert_same(torch.autograd.grad(attend(given), inputs, grad), wanted)


@pytest.mark.parametrize("adds", [False, True])
def test_the_stream_meets_itself_behind_a_norm(adds: bool) -> None:
    x, y, weight, bias = random(7, 5), random(7, 5, seed=1), random(5, seed=2), random(5, seed=3)
    added_bias, grads = random(5, seed=4), [random(7, 5, seed=n).detach() for n in (5, 6)]
    inputs = (x, weight, bias, y, added_bias) if adds else (x, weight, bias)
    total = x + (y + added_bias) if adds else x * 1
    wanted = torch.autograd.grad((total, F.layer_norm(total, (5,), weight, bias, 1e-5)), inputs, grads)
    added = y + added_bias.detach() if adds else None
    got = residual_norm(x, added, added_bias if adds else None, weight, bias, 1e-5)
    assert_same(got, (total, F.layer_norm(total, (5,), weight, bias, 1e-5)))
    assert_same(torch.autograd.grad(got, inputs, grads), wanted)


@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(3.0), LossTerms(0.0, 0.1), LossTerms(3.0, 0.1)], ids=str)
def test_loss_and_gradient_whole_and_in_shares(terms: LossTerms) -> None:
    logits, labels, weights = random(6, 10), torch.tensor([0, 9, 4, 5, 3, 7]), random(6, seed=1).detach().abs()
    softcap, z_weight = terms
    entering = softcap * torch.tanh(logits / softcap) if softcap else logits
    lse = torch.logsumexp(entering, -1)
    losses = F.cross_entropy(entering, labels, reduction="none") + z_weight * lse**2
    (wanted,) = torch.autograd.grad((losses * weights).sum() * 8, logits)
    scale = torch.tensor(8.0, dtype=torch.float64)
    loss, grad = plain_loss.loss_and_grad(logits.detach(), labels, weights, scale, terms)
    assert_same((loss, grad), ((losses * weights).sum().detach(), wanted))

    shares = [(logits.detach()[:, :4], labels), (logits.detach()[:, 4:], labels - 4)]
    (m, s, own), (n, t, other) = (plain_loss.local_statistics(*share, softcap) for share in shares)
    maximum = torch.maximum(m, n)
    lse = (s * (m - maximum).exp() + t * (n - maximum).exp()).log() + maximum
    assert_same((plain_loss.token_losses(lse, own + other, terms),), (losses.detach(),))
    parts = [plain_loss.local_grad(*share, lse, weights, scale, terms) for share in shares]
    assert_same((torch.cat(parts, 1),), (wanted,))
