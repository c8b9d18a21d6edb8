"""Parts of the model against their plain definitions, in fp64."""

import pytest
import torch
import torch.nn.functional as F

from gptpar.kernels import plain_loss
from gptpar.kernels.plain_loss import LossTerms
from gptpar.model.gpt import gpt_model
from gptpar.model.norm import RMSNorm
from gptpar.pipeline import Stage
from gptpar.system.hashes import seed_of
from gptpar.tensor_parallel import cross_entropy
from gptpar.tensor_parallel.axis import ALONE
from gptpar.tensor_parallel.cross_entropy import LinearCrossEntropy, losses_of_tokens, num_chunks
from gptpar.topology.initial_values import Normal, draw
from tests.helpers import inits_of_stage, random_tokens, tiny_config
from tests.unit.model.stages import gradients_of, require_same, stage_of

GROUPS = "--num-query-groups 2"
MASK = (torch.arange(32).view(2, 16) % 5 != 0).double()


@pytest.mark.parametrize("padding", [0, 14])
@pytest.mark.parametrize(("least_rows", "chunks"), [(cross_entropy.MIN_ROWS, 1), (cross_entropy.MIN_ROWS, 3), (10, 10)])
def test_linear_cross_entropy_equals_logits_then_loss(
    chunks: int, least_rows: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, both gradients and the losses of tokens; rows that pad the vocabulary change no number."""
    n, v, d = 20, 50, 8
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", least_rows)
    monkeypatch.setattr(cross_entropy, "ROW_TILE", 8)
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", (v + padding) * 8 * (n // chunks))
    assert num_chunks(n, v + padding, 8, "cpu") >= chunks
    hidden = torch.randn(n, d, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(v + padding, d, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.randint(0, v, (n,)), torch.rand(n, dtype=torch.float64)
    for terms in (LossTerms(), LossTerms(3.0, 0.1)):
        logits = hidden @ weight[:v].t()
        entering = 3 * torch.tanh(logits / 3) if terms.softcap else logits
        losses, lse = F.cross_entropy(entering, labels, reduction="none"), torch.logsumexp(entering, -1)
        expected = ((losses + terms.z_weight * lse**2) * weights).sum()
        wanted = torch.autograd.grad(expected * 3.0, (hidden, weight))
        for scale in (1.0, 3.0, 1024.0):  # the incoming gradient need not be the one announced
            announced = torch.tensor(scale, dtype=torch.float64)
            loss = LinearCrossEntropy.apply(hidden, weight, labels, weights, announced, ALONE, None, None, terms, v)
            got = torch.autograd.grad(loss * 3.0, (hidden, weight))
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)
            loss = LinearCrossEntropy.apply(hidden, weight, labels, weights, announced, ALONE, None, None, terms, v)
            itself = torch.autograd.grad(loss, (hidden, weight), announced)
            torch.testing.assert_close(itself, [w * (scale / 3) for w in wanted], rtol=1e-11, atol=1e-11)
        of_tokens = losses_of_tokens(hidden, weight, labels, ALONE, None, terms._replace(z_weight=0.0), v)
        torch.testing.assert_close(of_tokens, losses.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_contributions_of_chunks_are_added_in_fp32(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 50 * 2 * (24 // chunks))
    hidden, weight = (torch.randn(rows, 8, dtype=torch.bfloat16, requires_grad=True) for rows in (24, 50))
    labels, weights = torch.randint(0, 50, (24,)), torch.rand(24)
    loss = LinearCrossEntropy.apply(hidden, weight, labels, weights, torch.ones(()))
    (got,) = torch.autograd.grad(loss, weight)
    total = torch.zeros(50, 8)
    with torch.no_grad():
        for h, label, w in zip(hidden.chunk(chunks), labels.chunk(chunks), weights.chunk(chunks), strict=True):
            _, grad = plain_loss.loss_and_grad(h @ weight.t(), label, w, torch.ones(()))
            total += grad.t() @ h
    assert torch.equal(got, total.bfloat16())


@pytest.mark.parametrize("chunks", [1, 3])
def test_rows_of_the_weights_gradient_are_told_when_they_are_formed(
    chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cross_entropy.CHUNK_BYTES, "cpu", 50 * 4 * (20 // chunks))
    monkeypatch.setattr(cross_entropy, "MIN_ROWS", 20)
    monkeypatch.setattr(cross_entropy, "ROW_TILE", 8)
    told: list[tuple[slice, torch.Tensor]] = []

    def tell(grad: torch.Tensor, rows: slice) -> None:
        told.append((rows, grad[rows].clone()))
        grad[rows.stop :].fill_(float("nan"))  # not formed yet

    hidden, weight = torch.randn(20, 8), torch.randn(50, 8, requires_grad=True)
    labels, weights = torch.randint(0, 50, (20,)), torch.rand(20)
    loss = LinearCrossEntropy.apply(hidden, weight, labels, weights, torch.ones(()), ALONE, None, tell)
    (grad,) = torch.autograd.grad(loss, weight)
    assert [rows for rows, _ in told] == [slice(0, 32), slice(32, 50)]
    assert torch.equal(torch.cat([part for _, part in told]), grad)


@pytest.mark.parametrize(
    ("flags", "z_weight"),
    [
        ("", 0),
        ("--untie-embeddings-and-output-weights", 0),
        ("--logit-softcap 0.3 --untie-embeddings-and-output-weights", 0),
        ("--mup --mup-base-hidden-size 8 --mup-base-kv-channels 2", 0),
        ("--z-loss-weight 0.1 --logit-softcap 2", 0.1),
        ("--use-z-loss --untie-embeddings-and-output-weights", 1e-4),
    ],
)
def test_losses_and_gradients_are_those_of_the_logits(
    flags: str, z_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The z-loss is a part of the training loss alone; an evaluation forms no gradient."""
    stage, tokens = stage_of(flags), random_tokens(2, 16, 60)
    x, labels = tokens[:, :-1], tokens[:, 1:]
    fields = {"labels": labels, "loss_mask": MASK, "seq_length": 16}
    loss, logits = stage(x, fields), stage(x, {"seq_length": 16})
    evaluated = (F.cross_entropy(logits, labels.flatten(), reduction="none") * MASK.flatten()).sum() / MASK.sum()
    wanted = evaluated + z_weight * (logits.logsumexp(-1) ** 2 * MASK.flatten()).sum() / MASK.sum()
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    require_same(gradients_of(stage, loss), gradients_of(stage, wanted))
    monkeypatch.setattr(plain_loss, "loss_and_grad", None)
    monkeypatch.setattr(plain_loss, "local_grad", None)
    with torch.no_grad():
        torch.testing.assert_close(stage(x, fields), evaluated, rtol=1e-14, atol=0)


@pytest.mark.parametrize("flags", ["", "--position-embedding-type rope"])
def test_a_document_does_not_see_the_one_before(flags: str) -> None:
    """With positions and attention reset, two documents in one sample give what each gives alone."""
    stage = stage_of(flags)
    tokens = random_tokens(1, 15, 60)
    positions = torch.tensor([[*range(6), *range(10)]])
    documents = torch.tensor([0, 6, 16])
    both = stage(tokens, {"position_ids": positions, "cu_seqlens": documents, "seq_length": 16})
    torch.testing.assert_close(both[:6], stage(tokens[:, :6], {"seq_length": 6}), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(both[6:], stage(tokens[:, 6:], {"seq_length": 10}), rtol=1e-10, atol=1e-12)


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    deep, shallow = stage_of(""), stage_of("--num-layers 1")
    ours, theirs = deep.global_parameters(), shallow.global_parameters()
    assert torch.equal(ours["embedding.weight"], theirs["embedding.weight"])
    assert torch.equal(ours["layers.0.mlp.up.weight"], theirs["layers.0.mlp.up.weight"])
    # Output projections are scaled by depth: the same draw, another scale.
    ratio = ours["layers.0.mlp.down.weight"] / theirs["layers.0.mlp.down.weight"]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 0.5**0.5), rtol=1e-6, atol=0)
    assert not torch.equal(ours["layers.0.mlp.up.weight"], ours["layers.1.mlp.up.weight"])


def test_initial_scales_are_megatrons() -> None:
    big = draw(Normal(0.02), torch.Size((500, 500)), 1, "x")
    assert abs(big.std().item() - 0.02) < 1e-4 and abs(big.mean().item()) < 2e-4
    inits = inits_of_stage(Stage(gpt_model(tiny_config().model).specs))
    assert inits["layers.1.attention.out.weight"] == Normal(0.02 / 2.0)
    assert inits["layers.1.attention.qkv.weight"] == Normal(0.02)


def test_seeds_are_stable() -> None:
    """A change here would silently change every run's initial weights and dropout."""
    assert seed_of(1234, "embedding.weight") == 6915944740240564239
    assert seed_of(1234, "dropout", 0, 1) != seed_of(1234, "dropout", 1, 0)


@pytest.mark.parametrize("gate", ["", "--attention-output-gate", "--attention-output-gate --add-qkv-bias"])
def test_a_norm_without_a_kernel_for_heads_normalises_them(monkeypatch: pytest.MonkeyPatch, gate: str) -> None:
    tokens = random_tokens(2, 16, 32)[:, :-1]
    fields = {"labels": tokens, "loss_mask": torch.ones(tokens.shape, dtype=torch.float64), "seq_length": 16}

    def computed() -> list[torch.Tensor]:
        stage = stage_of(f"--qk-layernorm --position-embedding-type rope --normalization RMSNorm {GROUPS} {gate}")
        loss = stage(tokens, fields)
        return [loss, *gradients_of(stage, loss).values()]

    with_kernel = computed()
    monkeypatch.setattr(RMSNorm, "of_head", None)
    torch.testing.assert_close(computed(), with_kernel, rtol=1e-11, atol=1e-13)
