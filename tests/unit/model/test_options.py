"""Options of the model against transformers, or against their definition where transformers has none."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gptpar.model.attention import Attention, window_of
from gptpar.model.block import Block
from gptpar.model.gpt import gpt_model
from gptpar.model.linear import Linears
from gptpar.optim.parameter_groups import ParameterGroups
from gptpar.pipeline import Stage
from gptpar.topology.initial_values import initialise
from tests.helpers import inits_of_stage, random_tokens, tiny_config


def filled(module: torch.nn.Module, seed: int = 5) -> dict[str, torch.Tensor]:
    """Random weights in fp64."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        parameter.data.normal_(std=0.3, generator=generator)
    return dict(module.named_parameters())


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


def plain_block(block: Any, placement: str, parallel: bool, x: torch.Tensor) -> torch.Tensor:
    """A block as a formula over its parts."""

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        its = getattr(block, name)
        if its is None:
            return x
        return F.layer_norm(x, its.weight.shape, its.weight, its.bias, its.eps)

    def attention(x: torch.Tensor) -> torch.Tensor:
        return norm("attention_post_norm", block.attention(norm("attention_norm", x), None, None, 16))

    def mlp(x: torch.Tensor) -> torch.Tensor:
        return norm("mlp_post_norm", block.mlp(norm("mlp_norm", x)))

    assert (block.attention_norm is None) == (placement == "post")
    assert (block.mlp_post_norm is None) == (placement == "pre")
    if parallel:
        return x + attention(x) + mlp(x)
    x = x + attention(x)
    return x + mlp(x)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
def test_norms_are_where_they_are_said_to_be(placement: str, parallel: bool) -> None:
    """Output and gradients, those of all biases among them."""
    flags = f"--norm-placement {placement} {'--use-parallel-residual' * parallel}"
    config = tiny_config(flags).model
    block = Block(config)
    parameters = filled(block)
    x = torch.randn(32, 32, dtype=torch.float64)
    into = torch.randn(32, 32, dtype=torch.float64)
    found = block(x, None, None, 16)
    got = torch.autograd.grad((found * into).sum(), list(parameters.values()))
    block.attention.out.bias_gradient = block.mlp.down.bias_gradient = True  # the formula leaves them to autograd
    wanted = plain_block(block, placement, parallel, x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for name, grad, plain in zip(
        parameters, got, torch.autograd.grad((wanted * into).sum(), list(parameters.values())), strict=True
    ):
        torch.testing.assert_close(grad, plain, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "squared_relu"])
def test_activations(activation: str) -> None:
    mlp = Block(tiny_config(f"--mlp-activation {activation}").model).mlp
    weights, x = filled(mlp), torch.randn(5, 32, dtype=torch.float64)
    up = x @ weights["up.weight"].t() + weights["up.bias"]
    inner = {
        "gelu_tanh": F.gelu(up, approximate="tanh"),
        "gelu": 0.5 * up * (1 + torch.erf(up / 2**0.5)),
        "squared_relu": up.clamp(min=0) ** 2,
    }[activation]
    wanted = inner @ weights["down.weight"].t() + weights["down.bias"]
    torch.testing.assert_close(mlp(x), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["geglu", "geglu_tanh", "liglu"])
def test_gates(activation: str) -> None:
    mlp = Block(tiny_config(f"--mlp-activation {activation} --ffn-hidden-size 24").model).mlp
    weights, x = filled(mlp), torch.randn(5, 32, dtype=torch.float64)
    up, value = (x @ weights["up.weight"][i].t() + weights["up.bias"][i] for i in range(2))
    inner = {
        "geglu": 0.5 * up * (1 + torch.erf(up / 2**0.5)),
        "geglu_tanh": F.gelu(up, approximate="tanh"),
        "liglu": up,
    }[activation]
    wanted = (inner * value) @ weights["down.weight"].t() + weights["down.bias"]
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
    model = gpt_model(config.model)
    stage = Stage(model.specs)
    weights = {name: torch.empty(p.shape) for name, p in stage.global_parameters().items()}
    initialise(weights, inits_of_stage(stage), seed=3)
    stage.place(weights)
    groups, infos = ParameterGroups(config.optimizer, config.model, model), stage.infos()
    rates = {name: 1e-2 * groups.factors[groups.group_of(name, info)].lr for name, info in infos.items()}
    optimizer = torch.optim.Adam([{"params": [p], "lr": rates[n]} for n, p in stage.global_parameters().items()])
    tokens = random_tokens(8, 16, 60)
    stream: list[torch.Tensor] = []
    stage.layers[-3].register_forward_hook(lambda module, args, y: stream.append(y.detach()))

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return stage(tokens[:, :-1], {"seq_length": 16})

    before = logits()
    for _ in range(4):
        optimizer.zero_grad()
        stage(tokens[:, :-1], {"labels": tokens[:, 1:], "seq_length": 16}).backward()
        optimizer.step()
    after = logits()
    return (stream[-1] - stream[0]).std().item(), (after - before).std().item()


@pytest.mark.parametrize("flags", ["", f"--untie-embeddings-and-output-weights {EXPERTS}"])
@pytest.mark.slow
def test_under_mup_steps_change_activations_alike_at_every_width(flags: str) -> None:
    """The coordinate check: without muP the same steps change a wider model's activations ever more."""
    mup = f"{flags} --mup --mup-base-hidden-size 32"
    narrow, *wider = (changes(width, mup) for width in (32, 128, 256))
    for found in wider:
        assert all(0.5 < one / base < 1.5 for one, base in zip(found, narrow, strict=True)), (found, narrow)
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
