"""ALiBi, normalised embeddings and norms whose weights are stored less one, against BLOOM of transformers."""

import pytest
import torch

from gptpar.model.attention import head_slopes
from gptpar.model.block import Block
from gptpar.model.gpt import gpt_model
from gptpar.model.norm import LayerNorm, ResidualLayerNorm, RMSNorm, WidthRMSNorm
from gptpar.pipeline import Stage
from tests.helpers import random_tokens, tiny_config

BLOOM = "--position-embedding-type alibi --embed-layernorm --norm-epsilon 1e-5"
HEADS = 6
NAMES = {
    "word_embeddings.weight": "embedding.weight",
    "word_embeddings_layernorm": "positions.norm",
    "input_layernorm": "attention_norm",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.dense": "attention.out",
    "post_attention_layernorm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "ln_f": "final_norm",
    "h.": "layers.",
}


def stage_of(flags: str) -> tuple[Stage, dict[str, torch.Tensor]]:
    """A whole model in fp64 without dropout, and its weights."""
    stage = Stage(gpt_model(tiny_config(flags).model).specs).eval()
    weights = {name: torch.empty(p.shape, dtype=torch.float64) for name, p in stage.global_parameters().items()}
    stage.place(weights)
    return stage, weights


def our_name(name: str) -> str:
    name = name.removeprefix("transformer.")
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("heads", [4, HEADS])
def test_logits_equal_blooms(heads: int) -> None:
    """With a number of heads that is a power of two, and with one that is not."""
    transformers = pytest.importorskip("transformers")
    its_config = transformers.BloomConfig(
        hidden_size=8 * heads, n_layer=2, n_head=heads, vocab_size=64, attention_dropout=0.0, hidden_dropout=0.0
    )
    theirs = transformers.BloomForCausalLM(its_config).double().eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in theirs.parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    stage, weights = stage_of(f"{BLOOM} --hidden-size {8 * heads} --num-attention-heads {heads}")
    for name, value in theirs.state_dict().items():
        if name != "lm_head.weight":
            weights[our_name(name)].copy_(value)
    tokens = random_tokens(2, 15, 60)
    with torch.no_grad():
        found = stage(tokens, {"seq_length": 16})
        wanted = theirs(tokens).logits.flatten(0, 1)[:, :60]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # its slopes are fp32


def test_slopes_of_ranks_are_those_of_all_heads() -> None:
    whole = head_slopes(0, 12, 12, torch.device("cpu"))
    parts = [head_slopes(first, 3, 12, torch.device("cpu")) for first in (0, 3, 6, 9)]
    assert torch.equal(whole, torch.cat(parts))
    assert whole[:8].tolist() == [2.0**-i for i in range(1, 9)]
    assert whole[8:].tolist() == [2.0 ** -(i + 0.5) for i in range(4)]


@pytest.mark.parametrize(
    "flags", ["", "--normalization RMSNorm --qk-layernorm --qk-layernorm-scope width --norm-placement peri"]
)
def test_a_weight_less_one_computes_the_same(flags: str) -> None:
    """Output and gradients equal those of the norms that hold one more."""
    less, plain = (Block(tiny_config(f"{flags} {more}").model) for more in ("--apply-layernorm-1p", ""))
    generator = torch.Generator().manual_seed(5)
    for parameter in plain.double().parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    less.double().load_state_dict(plain.state_dict())
    norms = [m for m in less.modules() if isinstance(m, LayerNorm | ResidualLayerNorm | RMSNorm | WidthRMSNorm)]
    assert norms
    for norm in norms:
        assert norm.declared["weight"].init.value == 0  # type: ignore[union-attr]
        norm.weight.data -= 1
    x = torch.randn(16, 32, dtype=torch.float64, generator=generator)
    found, wanted = less(x, None, None, 16), plain(x, None, None, 16)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for mine, its in zip(
        torch.autograd.grad(found.square().sum(), list(less.parameters())),
        torch.autograd.grad(wanted.square().sum(), list(plain.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-10)
