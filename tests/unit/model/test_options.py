"""Options of the model against transformers, or against their definition where transformers has none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gptpar.model.attention import Attention, head_slopes, window_of
from gptpar.model.block import Block
from gptpar.model.gpt import gpt_model
from gptpar.model.linear import Linears
from gptpar.model.norm import LayerNorm, ResidualLayerNorm, RMSNorm, WidthRMSNorm
from gptpar.optim.parameter_groups import ParameterGroups
from gptpar.pipeline import Stage
from tests.helpers import inits_of_stage, random_tokens, tiny_config
from tests.unit.model.stages import filled, initial_stage, require_same

# --- against transformers ---------------------------------------------------------------------------------------------


def test_gated_attention_equals_qwen3_nexts() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    its_config = qwen.Qwen3NextConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=1,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )
    its_config._attn_implementation = "eager"
    theirs = qwen.Qwen3NextAttention(its_config, 0).eval()
    flags = "--attention-output-gate --qk-layernorm --normalization RMSNorm --disable-bias-linear --num-query-groups 2 "
    ours = Attention(Linears(tiny_config(f"{flags} --position-embedding-type rope --rotary-percent 0.5").model))
    weights, its = filled(ours), dict(theirs.double().named_parameters())
    q, k, v, gate = weights["qkv.weight"].view(2, 6, 8, 32).split([2, 1, 1, 2], dim=1)
    its["q_proj.weight"].data = torch.stack([q.flatten(0, 1), gate.flatten(0, 1)], dim=1).reshape(64, 32)
    its["k_proj.weight"].data, its["v_proj.weight"].data = k.reshape(16, 32), v.reshape(16, 32)
    its["o_proj.weight"].data = weights["out.weight"].data
    its["q_norm.weight"].data = weights["query_norm.weight"].data - 1  # it multiplies by 1 + weight
    its["k_norm.weight"].data = weights["key_norm.weight"].data - 1
    x_BSD = torch.randn(2, 16, 32, dtype=torch.float64)
    turns = qwen.Qwen3NextRotaryEmbedding(its_config)(x_BSD, torch.arange(16).expand(2, -1))
    later_SS = torch.full((16, 16), -torch.inf, dtype=torch.float64).triu(1)
    wanted, _ = theirs(x_BSD, turns, later_SS.expand(2, 1, -1, -1))
    torch.testing.assert_close(ours(x_BSD.flatten(0, 1), None, None, 16), wanted.flatten(0, 1), rtol=1e-5, atol=1e-6)


BLOOM = "--position-embedding-type alibi --embed-layernorm --norm-epsilon 1e-5"
NAMES = {
    "transformer.": "",
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


@pytest.mark.parametrize("heads", [4, 6])
def test_logits_equal_blooms(heads: int) -> None:
    """ALiBi and normalised embeddings, with a number of heads that is a power of two, and with one that is not."""
    transformers = pytest.importorskip("transformers")
    its_config = transformers.BloomConfig(
        hidden_size=8 * heads, n_layer=2, n_head=heads, vocab_size=64, attention_dropout=0.0, hidden_dropout=0.0
    )
    theirs = transformers.BloomForCausalLM(its_config).eval()
    filled(theirs)
    weights = {}
    for name, value in theirs.transformer.named_parameters():
        for its, ours in NAMES.items():
            name = name.replace(its, ours)
        weights[name] = value.detach()
    stage = Stage(
        gpt_model(tiny_config(f"{BLOOM} --hidden-size {8 * heads} --num-attention-heads {heads}").model).specs
    )
    assert weights.keys() == stage.global_parameters().keys()
    stage.place(weights)
    tokens = random_tokens(2, 15, 60)
    with torch.no_grad():
        found, wanted = stage.eval()(tokens, {"seq_length": 16}), theirs(tokens).logits.flatten(0, 1)[:, :60]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # its slopes are fp32


def test_slopes_of_ranks_are_those_of_all_heads() -> None:
    whole = head_slopes(0, 12, 12, torch.device("cpu"))
    parts = [head_slopes(first, 3, 12, torch.device("cpu")) for first in (0, 3, 6, 9)]
    assert torch.equal(whole, torch.cat(parts))
    assert whole.tolist() == [*(2.0**-i for i in range(1, 9)), *(2.0 ** -(i + 0.5) for i in range(4))]


# --- against definitions ----------------------------------------------------------------------------------------------


def plain_block(block: Any, placement: str, parallel: bool, x: torch.Tensor) -> torch.Tensor:
    """A block as a formula over its parts."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        its = getattr(block, name)
        return x if its is None else F.layer_norm(x, its.weight.shape, its.weight, its.bias, its.eps)

    assert (block.attention_norm is None) == (placement == "post")
    assert (block.mlp_post_norm is None) == (placement == "pre")
    attended = norm("attention_post_norm", block.attention(norm("attention_norm", x), None, None, 16))
    into_mlp = x if parallel else x + attended
    return x + attended + norm("mlp_post_norm", block.mlp(norm("mlp_norm", into_mlp)))


def gradients(y: torch.Tensor, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of the sum of squares, in each parameter."""
    parameters = dict(module.named_parameters())
    return dict(zip(parameters, torch.autograd.grad(y.square().sum(), list(parameters.values())), strict=True))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
def test_norms_are_where_they_are_said_to_be(placement: str, parallel: bool) -> None:
    """Output and gradients, those of all biases among them."""
    block = Block(tiny_config(f"--norm-placement {placement} {'--use-parallel-residual' * parallel}").model)
    filled(block)
    x = torch.randn(32, 32, dtype=torch.float64)
    found = block(x, None, None, 16)
    got = gradients(found, block)
    block.attention.out.bias_gradient = block.mlp.down.bias_gradient = True  # the formula leaves them to autograd
    wanted = plain_block(block, placement, parallel, x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    require_same(got, gradients(wanted, block), atol=1e-10)


@pytest.mark.parametrize(
    "flags", ["", "--normalization RMSNorm --qk-layernorm --qk-layernorm-scope width --norm-placement peri"]
)
def test_a_weight_less_one_computes_the_same(flags: str) -> None:
    """Output and gradients equal those of the norms that hold one more."""
    less, plain = (Block(tiny_config(f"{flags} {more}").model) for more in ("--apply-layernorm-1p", ""))
    filled(plain)
    less.double().load_state_dict(plain.state_dict())
    norms = [m for m in less.modules() if isinstance(m, LayerNorm | ResidualLayerNorm | RMSNorm | WidthRMSNorm)]
    assert norms
    for norm in norms:
        assert norm.declared["weight"].init.value == 0  # type: ignore[union-attr]
        norm.weight.data -= 1
    x = torch.randn(16, 32, dtype=torch.float64)
    found, wanted = less(x, None, None, 16), plain(x, None, None, 16)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    require_same(gradients(found, less), gradients(wanted, plain), atol=1e-10)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("name", "function", "gated"),
    [
        ("gelu_tanh", gelu_tanh, False),
        ("gelu", gelu, False),
        ("squared_relu", lambda x: x.clamp(min=0) ** 2, False),
        ("geglu", gelu, True),
        ("geglu_tanh", gelu_tanh, True),
        ("liglu", lambda x: x, True),
    ],
)
def test_activations(name: str, function: Callable[[torch.Tensor], torch.Tensor], gated: bool) -> None:
    mlp = Block(tiny_config(f"--mlp-activation {name} --ffn-hidden-size 24").model).mlp
    weights, x = filled(mlp), torch.randn(5, 32, dtype=torch.float64)
    matrices, biases = weights["up.weight"].view(-1, 24, 32), weights["up.bias"].view(-1, 24)
    up, *value = (x @ matrix.t() + bias for matrix, bias in zip(matrices, biases, strict=True))
    inner = function(up) * value[0] if gated else function(up)
    wanted = inner @ weights["down.weight"].t() + weights["down.bias"]
    torch.testing.assert_close(mlp(x), wanted, rtol=1e-12, atol=1e-12)


def test_windows_follow_their_pattern_and_count_what_is_seen() -> None:
    m = tiny_config("--num-layers 6 --window-size 4 --window-pattern SSF").model
    assert [window_of(m, layer) for layer in range(6)] == [4, 4, None, 4, 4, None]
    model, full = gpt_model(m), gpt_model(tiny_config("--num-layers 6").model)
    # A window of 4 over 16 tokens sees 1 + 2 + 3 + 13 * 4 pairs, all tokens 16 * 17 / 2; counted without the diagonal.
    fewer = 4 * 32 * (8 - (4 - 16 / 32))
    assert [b - a for a, b in zip(model.flops, full.flops, strict=True)] == [0, 0, *[fewer, fewer, 0] * 2, 0, 0]
    assert full.flops_per_token(causal=True) - model.flops_per_token(causal=True) == 3 * 4 * fewer
    assert all(window_of(tiny_config("--window-size 16").model, layer) is None for layer in range(2))


def test_flops_of_documents_are_those_of_what_is_seen() -> None:
    """Samples of 16 in documents of 8, 4, 3 and 1, with a window of 4 in one of the layers."""
    model = gpt_model(tiny_config("--window-size 4 --window-pattern SF").model)
    windowed, full = 2 * (4 * 8 - 8) + (8 + 9 / 2 + 1 / 2) * 2, 64 + 16 + 9 + 1  # twice the pairs
    whole = 2 * (4 * 16 - 8) + 256
    for causal in (False, True):
        fewer = model.flops_per_token(causal=causal) - model.flops_per_token(
            causal=causal, document_lengths=(8, 4, 3, 1)
        )
        assert fewer == (1 if causal else 2) * 3 * 4 * 32 * (whole - windowed - full) / 2 / 16
    lengths = (16,) * 3
    assert model.flops_per_token(causal=True, document_lengths=lengths) == model.flops_per_token(causal=True)


# --- muP --------------------------------------------------------------------------------------------------------------


EXPERTS = (
    "--num-experts 4 --disable-bias-linear --swiglu --moe-router-pre-softmax --moe-shared-expert-intermediate-size 64 "
    "--moe-shared-expert-gate"
)


def changes(width: int, flags: str) -> tuple[float, float]:
    """Deviations of what four steps of Adam add to the last block's output and to the logits."""
    config = tiny_config(f"--hidden-size {width} --num-attention-heads {width // 8} {flags}")
    stage = initial_stage(config.model, torch.float32)
    groups, infos = ParameterGroups(config.optimizer, config.model, gpt_model(config.model)), stage.infos()
    rates = {name: 1e-2 * groups.factors[groups.group_of(name, info)].lr for name, info in infos.items()}
    optimizer = torch.optim.Adam([{"params": [p], "lr": rates[n]} for n, p in stage.global_parameters().items()])
    tokens = random_tokens(8, 16, 60)
    stream: list[torch.Tensor] = []
    logits: list[torch.Tensor] = []
    stage.layers[-3].register_forward_hook(lambda module, args, y: stream.append(y.detach()))
    for step in range(5):
        with torch.no_grad():
            logits.append(stage(tokens[:, :-1], {"seq_length": 16}))
        if step < 4:
            optimizer.zero_grad()
            stage(tokens[:, :-1], {"labels": tokens[:, 1:], "seq_length": 16}).backward()
            optimizer.step()
    return (stream[-1] - stream[0]).std().item(), (logits[-1] - logits[0]).std().item()


@pytest.mark.parametrize("flags", ["", f"--untie-embeddings-and-output-weights {EXPERTS}"])
@pytest.mark.slow
def test_under_mup_steps_change_activations_alike_at_every_width(flags: str) -> None:
    """The coordinate check: without muP the same steps change a wider model's activations ever more."""
    mup = f"{flags} --mup --mup-base-hidden-size 32"
    narrow, wide = changes(32, mup), changes(256, mup)
    assert all(0.5 < one / base < 1.5 for one, base in zip(wide, narrow, strict=True)), (wide, narrow)
    without = changes(256, flags)
    assert without[0] > 10 * narrow[0] and without[1] > 3 * narrow[1]
    assert changes(32, flags) == narrow


def test_mups_initial_values_and_multipliers_are_the_papers() -> None:
    flags = f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 {EXPERTS} --moe-layer-freq [0,1]"
    mup = f"{flags} --mup --mup-base-hidden-size 16 --mup-base-kv-channels 4"
    without, scaled = (inits_of_stage(Stage(gpt_model(tiny_config(words).model).specs)) for words in (flags, mup))
    for name, init in scaled.items():
        in_block = name.startswith("layers.") and "norm" not in name
        ratio = getattr(without[name], "std", 1.0) / getattr(init, "std", 1.0)
        of_router = name in ("layers.1.mlp.router.weight", "layers.1.mlp.gate")
        assert ratio == pytest.approx(4.0 if of_router else 2.0 if in_block else 1.0), name
    attention = Attention(Linears(tiny_config(mup).model))
    assert attention.scale == 2 / 16  # sqrt(4) / 16
