"""The layers around the blocks: position embedding, and the LM head with its loss.

Legend: B batch, S sequence, D model width, V padded vocabulary, N = B x S tokens. Under sequence parallelism hidden
states between layers hold this rank's tokens only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from gptpar.config import ModelConfig
from gptpar.kernels.plain_loss import CROSS_ENTROPY, LossTerms, capped
from gptpar.model import mup
from gptpar.model.dropout import EMBEDDINGS, HiddenDropout, LayerSeeds
from gptpar.model.norm import make_norm
from gptpar.tensor_parallel import ALONE, TensorAxis, VocabParallelEmbedding
from gptpar.tensor_parallel.axis import copy_to, gather_tokens
from gptpar.tensor_parallel.cost import BatchShape, Cost, Product
from gptpar.tensor_parallel.cross_entropy import LinearCrossEntropy, losses_of_tokens, num_chunks
from gptpar.tensor_parallel.products import product
from gptpar.topology.initial_values import Normal
from gptpar.topology.placement import ParameterSpec

LOGIT_PASSES = 5
"""Elements of the logits moved: written, read twice, gradient written, and read by the products."""


class PositionEmbedding(nn.Module):
    """Normalises token embeddings and adds learned position embeddings, if the model does that; then dropout."""

    def __init__(self, config: ModelConfig, axis: TensorAxis = ALONE):
        super().__init__()
        self.axis, self.splits_tokens = axis, axis.splits_tokens
        between = axis.between_layers
        self.norm = make_norm(config, config.hidden_size, between) if config.embed_layernorm else None
        self.weight: nn.Parameter | None = None
        if config.position_embedding_type == "learned_absolute":
            init = Normal(config.init_method_std)
            self.declared = {"weight": ParameterSpec(init, between)}
            self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))
        self.dropout = HiddenDropout(config.hidden_dropout, EMBEDDINGS, axis)

    def forward(
        self, x_ND: torch.Tensor, positions_BS: torch.Tensor | None, seq_length: int, seeds: LayerSeeds | None = None
    ) -> torch.Tensor:
        """Returns y_ND; with dropout, training needs the layer's seeds."""
        if self.norm is not None:
            x_ND = self.norm(x_ND)
        if self.weight is not None:
            x_ND = self._add(self.weight, x_ND, positions_BS, seq_length)
        return self.dropout(x_ND, seeds)

    def _add(
        self, weight: torch.Tensor, x_ND: torch.Tensor, positions_BS: torch.Tensor | None, seq_length: int
    ) -> torch.Tensor:
        if positions_BS is None and not self.splits_tokens:
            return (x_ND.unflatten(0, (-1, seq_length)) + weight[:seq_length]).flatten(0, 1)
        own = x_ND.shape[0]  # all ranks hold the same number of tokens
        start = self.axis.rank * own if self.splits_tokens else 0
        if positions_BS is None:
            positions_N = torch.arange(start, start + own, device=x_ND.device) % seq_length
        else:
            positions_N = positions_BS.flatten()[start : start + own]
        return x_ND + weight[positions_N]

    def cost(self, batch: BatchShape) -> Cost:
        """The cost of the norm and of dropout's mask."""
        kept = 0.0 if self.norm is None else self.norm.cost(batch).kept
        return Cost(kept=kept / self.axis.token_splits)


class Logits(NamedTuple):
    """How a model forms its logits and its loss.

    Attributes:
        multiplier: factor of the hidden states before the projection (:mod:`gptpar.model.mup`).
        terms: the logits' softcap, and what the loss adds to the cross entropy.
        num_ids: number of logits of a token: rows of the matrix beyond these pad the vocabulary. ``None``: all rows.
    """

    multiplier: float = 1.0
    terms: LossTerms = CROSS_ENTROPY
    num_ids: int | None = None

    @staticmethod
    def of(config: ModelConfig) -> Logits:
        """How a model with this configuration forms its logits and its loss."""
        terms = LossTerms(config.logit_softcap, config.z_loss_weight)
        return Logits(mup.output_multiplier(config), terms, config.softmax_vocab_size)


def output_and_loss(
    vocabulary: VocabParallelEmbedding,
    x_ND: torch.Tensor,
    labels_BS: torch.Tensor | None = None,
    loss_mask_BS: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    each_token: bool | None = None,
    loss_divisor: torch.Tensor | None = None,
    *,
    logits: Logits = Logits(),  # noqa: B008
) -> torch.Tensor:
    """Project hidden states to logits; with labels, return the micro-batch's mean loss instead.

    Without gradients the loss has no z-loss: an evaluation reports the cross entropy alone.

    Args:
        vocabulary: holds the matrix weight_VD, which is the embedding's or the LM head's own.
        labels_BS: the token that follows each token.
        loss_mask_BS: weight of each token, by default 1; the mean is ``sum(mask * loss) / max(1, sum(mask))``.
        scale: the incoming gradient that ``backward`` will be given (see :class:`LinearCrossEntropy`).
        each_token: return the cross entropy of each token instead of the mean; without gradients.
        loss_divisor: replaces ``max(1, sum(mask))``, for a mean over more than this micro-batch.
        logits: how logits and loss are formed.

    Returns:
        logits_NV without labels, those of padding left out; losses_N for each token, else a scalar; losses are at
        least fp32.
    """
    if logits.multiplier != 1:
        x_ND = x_ND * logits.multiplier
    if labels_BS is None:
        assert vocabulary.axis.size == 1, "logits of a split vocabulary are never gathered"
        return capped(product(x_ND, vocabulary.weight.t())[:, : logits.num_ids], logits.terms.softcap)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    labels_N = labels_BS.flatten()
    axis, split, hidden_ND = vocabulary.axis, vocabulary.split, x_ND
    if axis.size > 1:
        hidden_ND = (gather_tokens if axis.splits_tokens else copy_to)(x_ND, axis)
    if each_token:
        terms = logits.terms._replace(z_weight=0.0)
        return losses_of_tokens(hidden_ND, vocabulary.weight, labels_N, axis, split, terms, logits.num_ids)
    if loss_mask_BS is None and loss_divisor is None:
        weights_N = torch.full(labels_N.shape, 1.0 / labels_N.numel(), dtype=wide, device=x_ND.device)
    else:
        mask_BS = torch.ones_like(labels_N) if loss_mask_BS is None else loss_mask_BS
        weights_N = mask_BS.flatten().to(wide)
        divisor = weights_N.sum().clamp(min=1) if loss_divisor is None else loss_divisor.to(wide)
        weights_N = weights_N / divisor
    scale = torch.ones((), dtype=wide, device=x_ND.device) if scale is None else scale
    # LinearCrossEntropy cannot see torch.no_grad(), and would form the weight's gradient in an evaluation, too.
    trains = torch.is_grad_enabled()
    weight_VD = vocabulary.weight if trains else vocabulary.weight.detach()
    terms = logits.terms if trains else logits.terms._replace(z_weight=0.0)
    return LinearCrossEntropy.apply(
        *(hidden_ND, weight_VD, labels_N, weights_N, scale, axis, split, vocabulary.on_output_grad, terms),
        logits.num_ids,
    )


def output_cost(vocabulary: VocabParallelEmbedding, batch: BatchShape) -> Cost:
    """The cost of :func:`output_and_loss` with labels."""
    axis, width = vocabulary.axis, vocabulary.weight.shape[1]
    rows = -(-vocabulary.num_embeddings // axis.size)
    chunks = num_chunks(batch.tokens, rows, batch.dtype.itemsize, batch.device_type)
    return Cost((Product(width, rows, moves_input=axis.size > 1),), forward=LOGIT_PASSES * rows, chunks=chunks)


class OutputLayer(VocabParallelEmbedding):
    """An LM head with a matrix of its own.

    Args:
        *shape, std, axis: see :class:`VocabParallelEmbedding`.
        logits: how logits and loss are formed.
    """

    def __init__(self, *shape: int, std: float, axis: TensorAxis = ALONE, logits: Logits = Logits()):  # noqa: B008
        super().__init__(*shape, std=std, axis=axis)
        self.logits = logits

    def forward(  # type: ignore[override]
        self,
        x_ND: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        loss_mask_BS: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        each_token: bool | None = None,
        loss_divisor: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :func:`output_and_loss`."""
        how = self.logits
        return output_and_loss(self, x_ND, labels_BS, loss_mask_BS, scale, each_token, loss_divisor, logits=how)

    cost = output_cost
