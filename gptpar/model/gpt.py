"""A GPT as a list of layer specifications."""

from __future__ import annotations

from gptpar.config import ModelConfig
from gptpar.model.block import NOTHING, Block
from gptpar.model.dropout import seeds_field
from gptpar.model.ends import OutputLayer, PositionEmbedding, output_and_loss
from gptpar.model.layer_spec import LayerSpec, TiedLayerSpec
from gptpar.model.norm import LayerNorm, RMSNorm
from gptpar.tensor_parallel import ALONE, TensorAxis, VocabParallelEmbedding

LOSS_FIELDS = ("labels", "loss_mask", "scale")
BLOCK_FIELDS = ("position_ids", "document_ids", "seq_length")


def gpt_layers(
    config: ModelConfig, axis: TensorAxis = ALONE, *, recompute_modules: frozenset[str] = NOTHING
) -> list[LayerSpec]:
    """Embedding, positions, blocks, final norm, output layer with loss.

    Args:
        config: a complete model configuration (nothing the model needs is ``None``).
        axis: this process's place on the tensor axis.
        recompute_modules: see :class:`Block`.
    """
    assert config.num_layers and config.hidden_size and config.padded_vocab_size
    width, std = config.hidden_size, config.init_method_std
    norm = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[config.normalization]
    shape = (config.padded_vocab_size, width)

    def seeds(layer: str) -> tuple[str, ...]:
        return (seeds_field(layer),) if config.has_dropout else ()

    embedding: LayerSpec
    output: LayerSpec
    if config.tied:
        embedding = TiedLayerSpec("embedding", VocabParallelEmbedding, *shape, std=std, axis=axis, name="embedding")
        output = TiedLayerSpec(
            "embedding",
            VocabParallelEmbedding,
            *shape,
            std=std,
            axis=axis,
            name="embedding",
            forward_fn=output_and_loss,
            batch_fields=LOSS_FIELDS,
        )
    else:
        embedding = LayerSpec(VocabParallelEmbedding, *shape, std=std, axis=axis, name="embedding")
        output = LayerSpec(OutputLayer, *shape, std=std, axis=axis, name="output", batch_fields=LOSS_FIELDS)
    return [
        embedding,
        LayerSpec(
            PositionEmbedding,
            config,
            axis,
            name="positions",
            batch_fields=("position_ids", "seq_length", *seeds("positions")),
        ),
        *(
            LayerSpec(
                Block,
                config,
                axis,
                recompute_modules=recompute_modules,
                name=f"layers.{i}",
                batch_fields=(*BLOCK_FIELDS, *seeds(f"layers.{i}")),
            )
            for i in range(config.num_layers)
        ),
        LayerSpec(norm, width, eps=config.norm_epsilon, gradient=axis.gradient_between_layers, name="final_norm"),
        output,
    ]
