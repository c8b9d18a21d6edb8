"""Fields of a mixture in a ``config.json``, and names of experts' weights, which families with experts share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gptpar.config import ModelConfig
from gptpar.model.experts.layer import Experts
from gptpar.model.families.fields import HfConfig
from gptpar.model.families.names import Within, of_expert


def mixture(config: HfConfig, *, width: int, normalised: bool, blocks: Sequence[bool]) -> dict[str, Any]:
    """The flags of blocks with experts that a softmax weighs.

    Args:
        width: each expert's inner width.
        normalised: whether the weights of a token's experts are divided by their sum.
        blocks: for each block, whether its MLP is a mixture.
    """
    number = config.size("num_local_experts", config.size("num_experts", 1))
    if number == 1 or not any(blocks):
        config.problems.append("no block has two experts or more: take the dense family that it then is.")
    return {
        "num_experts": number,
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": width,
        "moe_router_pre_softmax": not normalised,
        "moe_layer_freq": layer_list(blocks),
    }


def layer_list(blocks: Sequence[bool]) -> str:
    """``--moe-layer-freq`` of blocks with and without experts."""
    return "1" if all(blocks) else str([int(has) for has in blocks]).replace(" ", "")


def blocks_of(model: ModelConfig) -> list[bool]:
    """For each block, whether its MLP is a mixture."""
    return list(model.blocks_with_experts(model.num_layers))


def mixture_fields(model: ModelConfig, number: str = "num_experts") -> dict[str, Any]:
    """The fields of a mixture in a ``config.json``.

    Args:
        number: the field with the number of experts.
    """
    return {number: model.num_experts, "num_experts_per_tok": model.moe_router_topk}


def expert_names(
    experts: Experts, folder: str, *, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Mapping[str, Mapping[str, Within]]:
    """Names of a mixture's weights, each expert's on their own.

    Args:
        folder: prefix of all of them.
        gate, up, down: names of an expert's products.
    """
    numbers, prefix = range(experts.num_experts), f"{folder}.experts"
    halves = {gate: 0, up: 1}
    return {
        "mlp.up": {
            f"{prefix}.{number}.{name}.weight": of_expert(number, half)
            for number in numbers
            for name, half in halves.items()
        },
        "mlp.down": {f"{prefix}.{number}.{down}.weight": of_expert(number) for number in numbers},
    }
