"""The model against Hugging Face's GPT-2 and Llama with the same weights: the same logits."""

from __future__ import annotations

import pytest
import torch

from gptpar.model.gpt import gpt_model
from gptpar.pipeline import Stage
from gptpar.topology.initial_values import initialise
from tests.helpers import inits_of_stage, random_tokens, tiny_config

transformers = pytest.importorskip("transformers")


def build(flags: str) -> tuple[Stage, dict[str, torch.Tensor]]:
    stage = Stage(gpt_model(tiny_config(flags).model).specs)
    weights = {name: torch.empty(p.shape) for name, p in stage.global_parameters().items()}
    initialise(weights, inits_of_stage(stage), seed=7)
    for name, value in weights.items():  # biases and norms start at 0 and 1, where mistakes would not show
        value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    stage.place(weights)
    return stage.eval(), weights


def split_qkv(qkv: torch.Tensor, groups: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows grouped as (queries, key, value) -> all queries, all keys, all values."""
    grouped = qkv.view(groups, -1, width, *qkv.shape[1:])
    q, k, v = grouped.split([grouped.shape[1] - 2, 1, 1], dim=1)
    return tuple(part.reshape(-1, *qkv.shape[1:]) for part in (q, k, v))  # type: ignore[return-value]


def test_logits_equal_gpt2() -> None:
    stage, ours = build("")
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4, attn_implementation="eager"
        )
    ).eval()
    theirs = {
        "transformer.wte.weight": ours["embedding.weight"],
        "lm_head.weight": ours["embedding.weight"],
        "transformer.wpe.weight": ours["positions.weight"],
        "transformer.ln_f.weight": ours["final_norm.weight"],
        "transformer.ln_f.bias": ours["final_norm.bias"],
    }
    for i in range(2):
        for end in ("weight", "bias"):
            qkv = torch.cat(split_qkv(ours[f"layers.{i}.attention.qkv.{end}"], 4, 8))
            pairs = {
                "ln_1": ours[f"layers.{i}.attention_norm.{end}"],
                "attn.c_attn": qkv,
                "attn.c_proj": ours[f"layers.{i}.attention.out.{end}"],
                "ln_2": ours[f"layers.{i}.mlp_norm.{end}"],
                "mlp.c_fc": ours[f"layers.{i}.mlp.up.{end}"],
                "mlp.c_proj": ours[f"layers.{i}.mlp.down.{end}"],
            }
            for name, value in pairs.items():  # GPT-2 stores its matrices transposed
                theirs[f"transformer.h.{i}.{name}.{end}"] = value.t() if value.dim() == 2 else value
    missing, unexpected = reference.load_state_dict(theirs, strict=False)
    assert not unexpected and all(name.endswith((".attn.bias", ".masked_bias")) for name in missing)
    tokens = random_tokens(3, 15, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            stage(tokens, {"seq_length": tokens.shape[1]}), reference(tokens).logits.flatten(0, 1)[:, :60], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("head_norms", [False, True], ids=["Llama", "Qwen3"])
def test_logits_equal_llama_and_qwen3(head_norms: bool) -> None:
    """The latter is the former with norms of queries and keys."""
    flags = (
        "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --num-query-groups 2 "
        f"--untie-embeddings-and-output-weights --ffn-hidden-size 48 {'--qk-layernorm' * head_norms}"
    )
    stage, ours = build(flags)
    kind, its_config = (
        (transformers.Qwen3ForCausalLM, transformers.Qwen3Config)
        if head_norms
        else (transformers.LlamaForCausalLM, transformers.LlamaConfig)
    )
    reference = kind(
        its_config(
            vocab_size=64,
            hidden_size=32,
            head_dim=8,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            rms_norm_eps=1e-5,
            attn_implementation="eager",
        )
    ).eval()
    theirs = {
        "model.embed_tokens.weight": ours["embedding.weight"],
        "lm_head.weight": ours["output.weight"],
        "model.norm.weight": ours["final_norm.weight"],
    }
    for i in range(2):
        q, k, v = split_qkv(ours[f"layers.{i}.attention.qkv.weight"], 2, 8)
        gate, up = ours[f"layers.{i}.mlp.up.weight"]
        pairs = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": ours[f"layers.{i}.attention.out.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": ours[f"layers.{i}.mlp.down.weight"],
            "input_layernorm": ours[f"layers.{i}.attention_norm.weight"],
            "post_attention_layernorm": ours[f"layers.{i}.mlp_norm.weight"],
        }
        if head_norms:
            pairs["self_attn.q_norm"] = ours[f"layers.{i}.attention.query_norm.weight"]
            pairs["self_attn.k_norm"] = ours[f"layers.{i}.attention.key_norm.weight"]
        theirs |= {f"model.layers.{i}.{name}.weight": value for name, value in pairs.items()}
    reference.load_state_dict(theirs, strict=True)
    tokens = random_tokens(3, 15, 64)
    with torch.no_grad():
        torch.testing.assert_close(
            stage(tokens, {"seq_length": tokens.shape[1]}), reference(tokens).logits.flatten(0, 1)[:, :60], rtol=1e-5, atol=1e-5
        )
