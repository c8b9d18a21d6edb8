"""Hugging Face names of a model whose blocks have different heads."""

from dataclasses import replace

import pytest
import torch

from gptpar.config import ModelConfig
from gptpar.model.families import names, tensors_of
from gptpar.model.gpt import gpt_model
from gptpar.model.layer_spec import LayerSpec
from gptpar.model.spec import ModelSpec
from tests.helpers import tiny_config

FLAGS = "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear --num-query-groups 2"


def mixed(config: ModelConfig) -> ModelSpec:
    """A GPT whose second block has one key and value head, and half as wide an MLP."""

    def changed(spec: LayerSpec) -> LayerSpec:
        own = replace(config, num_query_groups=1, ffn_hidden_size=config.ffn_hidden_size // 2)
        return LayerSpec(spec.cls, own, *spec.args[1:], name=spec.name, **spec.kwargs)

    model = gpt_model(config)
    layers = (replace(one, spec=changed(one.spec)) if one.spec.name == "layers.1" else one for one in model.layers)
    return replace(model, layers=tuple(layers))


def test_each_block_has_its_own_shapes_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "gpt_model", mixed)
    model = tiny_config(FLAGS).model
    found = {tensor.name: tensor for tensor in tensors_of("llama", model, 60)}
    inner = model.ffn_hidden_size
    for block, keys, width in ((0, 16, inner), (1, 8, inner // 2)):
        shapes = [found[f"model.layers.{block}.{name}.weight"].shape for name in ("self_attn.k_proj", "mlp.up_proj")]
        assert shapes == [(keys, 32), (width, 32)]
    rows = torch.arange(48)  # of the second block: four queries of 8 channels, the key, the value
    first_columns = {kind: found[f"model.layers.1.self_attn.{kind}_proj.weight"].view(rows[:, None]) for kind in "qkv"}
    assert [(int(x.min()), int(x.max())) for x in first_columns.values()] == [(0, 31), (32, 39), (40, 47)]
