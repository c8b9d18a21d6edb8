"""Lists a GPT's layers from the first to the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from gptpar.config import ModelConfig
from gptpar.config.roles import Role, layer_roles
from gptpar.model.attention import is_rotary, window_of
from gptpar.model.block import NOTHING, Block
from gptpar.model.dropout import seeds_field
from gptpar.model.embedding_and_head import Logits, OutputLayer, PositionEmbedding, output_and_loss, output_cost
from gptpar.model.experts.balance import choice_field
from gptpar.model.experts.dispatch import ALL_EXPERTS, ExpertAxis
from gptpar.model.experts.routing import losses_of
from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec
from gptpar.model.norm import NORMS, norm_arguments
from gptpar.model.spec import ModelLayer, ModelSpec
from gptpar.tensor_parallel import ALONE, TensorAxis, VocabParallelEmbedding

LOSS_FIELDS = ("labels", "loss_mask", "scale", "each_token", "loss_divisor")
"""Fields of a micro-batch that the LM head takes, see :func:`~gptpar.model.embedding_and_head.output_and_loss`."""
BLOCK_FIELDS = ("position_ids", "cu_seqlens", "seq_length")
"""Fields of a micro-batch that a block takes."""
NO_SEEDS = "no dropout seeds"
"""A field that no micro-batch has, for the place of seeds among a block's arguments."""
POSITION_FIELDS = ("position_ids", "seq_length")
"""Fields of a micro-batch that the position embedding takes."""


def gpt_model(
    config: ModelConfig,
    axis: TensorAxis = ALONE,
    *,
    recompute_modules: frozenset[str] = NOTHING,
    mlp_tiles: int = 1,
    experts: ExpertAxis = ALL_EXPERTS,
) -> ModelSpec:
    """Describe a GPT.

    Args:
        config: a complete model configuration (nothing the model needs is ``None``).
        axis: this process's place on the tensor axis.
        recompute_modules, mlp_tiles: see :class:`Block`.
        experts: this process's place on the expert axis.
    """
    block = partial(LayerSpec, Block, config, axis, recompute_modules=recompute_modules, mlp_tiles=mlp_tiles)
    return ModelSpec(tuple(_layers(config, axis, block, experts)), config.seq_length)


def _layers(
    config: ModelConfig, axis: TensorAxis, block: Callable[..., LayerSpec], placed: ExpertAxis
) -> Iterator[ModelLayer]:
    number, with_experts = 0, config.blocks_with_experts(config.num_layers)
    for role in layer_roles(config.num_layers):
        match role:
            case Role.EMBEDDING:
                yield ModelLayer(role, _embedding(config, axis))
            case Role.POSITIONS:
                fields = (*POSITION_FIELDS, *_seeds(config, "positions"))
                yield ModelLayer(
                    role, LayerSpec(PositionEmbedding, config, axis, name="positions", batch_fields=fields)
                )
            case Role.BLOCK:
                name = f"layers.{number}"
                experts = with_experts[number]
                fields = (*BLOCK_FIELDS, *_seeds(config, name))
                of_layer: dict[str, Any] = {"window": window_of(config, number), "rotary": is_rotary(config, number)}
                if experts:
                    fields = (*BLOCK_FIELDS, *(_seeds(config, name) or (NO_SEEDS,)), choice_field(name))
                    of_layer |= {"experts": placed, "auxiliary_losses": losses_of(config)}
                yield ModelLayer(role, block(**of_layer, name=name, batch_fields=fields))
                number += 1
            case Role.FINAL_NORM:
                norm, placement = NORMS[config.normalization], axis.between_layers
                how = norm_arguments(config)
                yield ModelLayer(
                    role, LayerSpec(norm, config.hidden_size, placement=placement, **how, name="final_norm")
                )
            case Role.LM_HEAD:
                yield ModelLayer(role, _head(config, axis))


def _seeds(config: ModelConfig, layer: str) -> tuple[str, ...]:
    return (seeds_field(layer),) if config.has_dropout else ()


def _embedding(config: ModelConfig, axis: TensorAxis) -> LayerSpec:
    shape, std = (config.padded_vocab_size, config.hidden_size), config.init_method_std
    if config.tied:
        return TiedLayerSpec("embedding", VocabParallelEmbedding, *shape, std=std, axis=axis, name="embedding")
    return LayerSpec(VocabParallelEmbedding, *shape, std=std, axis=axis, name="embedding")


def _head(config: ModelConfig, axis: TensorAxis) -> LayerSpec:
    shape, std = (config.padded_vocab_size, config.hidden_size), config.init_method_std
    if not config.tied:
        how = Logits.of(config)
        return LayerSpec(OutputLayer, *shape, std=std, axis=axis, logits=how, name="output", batch_fields=LOSS_FIELDS)
    return TiedLayerSpec(
        "embedding",
        VocabParallelEmbedding,
        *shape,
        std=std,
        axis=axis,
        name="embedding",
        forward_fn=partial(output_and_loss, logits=Logits.of(config)),
        cost_fn=output_cost,
        batch_fields=LOSS_FIELDS,
    )
