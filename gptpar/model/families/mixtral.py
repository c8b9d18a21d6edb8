"""Mixtral (Jiang et al. 2024): Llama with experts in every block, and sliding windows in all layers or in none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gptpar.config import ModelConfig, ModelFlags
from gptpar.model.block import Block
from gptpar.model.experts.layer import Experts
from gptpar.model.families.fields import HfConfig, windows_of
from gptpar.model.families.llama import LLAMA_NAMES, fields_like_llama, like_llama
from gptpar.model.families.mixtures import expert_names, mixture, mixture_fields
from gptpar.model.families.names import WHOLE, Within


def mixtral(config: HfConfig) -> ModelFlags:
    """The flags of a ``MixtralForCausalLM``."""
    config.require("router_jitter_noise", 0.0, "the router reads what the experts read")
    experts = mixture(
        config, width=config["intermediate_size"], normalised=True, blocks=[True] * config["num_hidden_layers"]
    )
    window = config.size("sliding_window", 0)
    return like_llama(
        config, query_groups=8, rope_theta=1_000_000, norm_eps=1e-5, window_size=window or None, **experts
    )


def mixtral_fields(model: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` of a model."""
    return fields_like_llama(
        model,
        "MixtralForCausalLM",
        intermediate_size=model.width_of_experts(model.ffn_hidden_size),
        router_jitter_noise=0.0,
        sliding_window=windows_of(model)[0],
        **mixture_fields(model, "num_local_experts"),
    )


def _block(block: Block) -> Mapping[str, Mapping[str, Within]]:
    names = dict(LLAMA_NAMES.block(block))
    if isinstance(block.mlp, Experts):
        names |= expert_names(block.mlp, "block_sparse_moe", gate="w1", up="w3", down="w2")
        names["mlp.router"] = {"block_sparse_moe.gate": WHOLE}
    return names


MIXTRAL_NAMES = replace(LLAMA_NAMES, block=_block)
