"""Who sums a bias's gradient changes where it is formed, and not what it is."""

import pytest
import torch

from gptpar.model.dropout import layers_with_dropout, seed_fields
from gptpar.model.gpt import gpt_model
from gptpar.model.linear import Linears
from gptpar.pipeline.stage import Stage
from gptpar.topology.initial_values import initialise
from tests.helpers import inits_of_stage, random_tokens, tiny_config
from tests.pairs import in_turns

OPTIONS = {
    "GPT-2": "",
    "dropout": "--hidden-dropout 0.3",
    "norms of heads, rotary": "--qk-layernorm --position-embedding-type rope --num-query-groups 2",
    "norms of heads, distances": "--qk-layernorm --position-embedding-type alibi --apply-layernorm-1p",
    "norm of all heads": "--qk-layernorm --qk-layernorm-scope width --normalization RMSNorm",
    "norms after": "--norm-placement post",
    "norms before and after": "--norm-placement peri --apply-layernorm-1p",
    "norms before and after, dropout": "--norm-placement peri --hidden-dropout 0.3",
    "norms before and after, parallel": "--norm-placement peri --use-parallel-residual",
    "SwiGLU": "--swiglu",
    "QKV bias alone": "--disable-bias-linear --add-qkv-bias",
}


def gradients(flags: str, modules: frozenset[str]) -> dict[str, torch.Tensor]:
    """Of every parameter, for one micro-batch in fp64."""
    model = gpt_model(tiny_config(flags).model, recompute_modules=modules)
    stage = Stage(model.specs)
    weights = {name: torch.empty(p.shape, dtype=torch.float64) for name, p in stage.global_parameters().items()}
    initialise(weights, inits_of_stage(stage), 1)
    stage.place(weights)
    tokens, device = random_tokens(2, 16, 60), torch.device("cpu")
    seeds = seed_fields(layers_with_dropout(model.specs), 1234, 0, 0, device)
    loss = stage(tokens[:, :-1], {"labels": tokens[:, 1:], "seq_length": 16, **seeds})
    parameters = stage.global_parameters()
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


@in_turns(name=list(OPTIONS), modules=[(), ("core_attn", "mlp", "layernorm"), ("mlp_act",)])
def test_readers_sum_what_the_layers_would(
    name: str, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gradients(OPTIONS[name], frozenset(modules))
    monkeypatch.setattr(Linears, "_is_summed_by", lambda self, reader: False)
    expected = gradients(OPTIONS[name], frozenset(modules))
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-10, atol=1e-16, msg=parameter)
