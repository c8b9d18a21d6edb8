"""Who sums a bias's gradient changes where it is formed, and not what it is."""

import pytest
import torch

from gptpar.model.dropout import layers_with_dropout, seed_fields
from gptpar.model.linear import Linears
from tests.helpers import random_tokens
from tests.pairs import in_turns
from tests.unit.model.stages import gradients_of, require_same, stage_of

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
    stage, tokens = stage_of(flags, recompute_modules=modules), random_tokens(2, 16, 60)
    seeds = seed_fields(layers_with_dropout(stage.specs), 1234, 0, 0, torch.device("cpu"))
    return gradients_of(stage, stage(tokens[:, :-1], {"labels": tokens[:, 1:], "seq_length": 16, **seeds}))


@in_turns(name=list(OPTIONS), modules=[(), ("core_attn", "mlp", "layernorm"), ("mlp_act",)])
def test_readers_sum_what_the_layers_would(
    name: str, modules: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = gradients(OPTIONS[name], frozenset(modules))
    monkeypatch.setattr(Linears, "_is_summed_by", lambda self, reader: False)
    expected = gradients(OPTIONS[name], frozenset(modules))
    require_same(found, expected, rtol=1e-10, atol=1e-16)
