"""Small models of transformers."""

from collections.abc import Callable

import pytest
import torch
from torch import nn


def tiny_hf(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 32}
    vocabulary = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    make: dict[str, Callable[[], nn.Module]] = {
        "GPT-2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=3, n_embd=16, n_head=2, n_positions=8, **vocabulary)
        ),
        "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **vocabulary)),
        "Llama in bfloat16": lambda: transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**small, **vocabulary), dtype=torch.bfloat16
        ),
        "T5": lambda: transformers.T5ForConditionalGeneration(
            transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2, **vocabulary)
        ),
    }
    return make[name]()
