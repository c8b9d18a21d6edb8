"""What surrounds the blocks: positions, and the output layer with its loss.

Legend: B batch, S sequence, D model width, V padded vocabulary, N = B x S tokens.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from gptpar.config import ModelConfig
from gptpar.init import Init, Normal
from gptpar.tensor_parallel import VocabParallelEmbedding
from gptpar.tensor_parallel.cross_entropy import LinearCrossEntropy


class PositionEmbedding(nn.Module):
    """Adds learned positions (where the model has them), then dropout."""

    shard_dims: ClassVar[dict[str, int]] = {}

    def __init__(self, config: ModelConfig):
        super().__init__()
        assert config.hidden_size
        self.weight: nn.Parameter | None = None
        if config.position_embedding_type == "learned_absolute":
            assert config.max_position_embeddings
            self.init: dict[str, Init] = {"weight": Normal(config.init_method_std)}
            self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x_BSD: torch.Tensor, positions_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Returns y_BSD."""
        if self.weight is not None:
            positions = slice(x_BSD.shape[1]) if positions_BS is None else positions_BS
            x_BSD = x_BSD + self.weight[positions]
        return self.dropout(x_BSD)


def output_and_loss(
    vocabulary: VocabParallelEmbedding,
    x_BSD: torch.Tensor,
    labels_BS: torch.Tensor | None = None,
    loss_mask_BS: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Project on the vocabulary; with labels, return the micro-batch's mean loss instead of logits.

    Args:
        vocabulary: holds the matrix weight_VD, tied to the input embedding or the output layer's own.
        labels_BS: the token that follows each token.
        loss_mask_BS: weight of each token, by default 1; the mean is ``sum(mask * loss) / max(1, sum(mask))``.
        scale: the incoming gradient that ``backward`` will be given (see :class:`LinearCrossEntropy`).

    Returns:
        logits_BSV without labels, else a scalar of at least fp32.
    """
    if labels_BS is None:
        return F.linear(x_BSD, vocabulary.weight)
    wide = torch.promote_types(x_BSD.dtype, torch.float32)
    labels_N = labels_BS.flatten()
    if loss_mask_BS is None:
        weights_N = torch.full(labels_N.shape, 1.0 / labels_N.numel(), dtype=wide, device=x_BSD.device)
    else:
        weights_N = loss_mask_BS.flatten().to(wide)
        weights_N = weights_N / weights_N.sum().clamp(min=1)
    scale = torch.ones((), dtype=wide, device=x_BSD.device) if scale is None else scale
    # The function cannot see torch.no_grad(), and would form the weight's gradient in an evaluation too.
    weight_VD = vocabulary.weight if torch.is_grad_enabled() else vocabulary.weight.detach()
    return LinearCrossEntropy.apply(x_BSD.flatten(0, 1), weight_VD, labels_N, weights_N, scale)


class OutputLayer(VocabParallelEmbedding):
    """An output layer with a matrix of its own."""

    def forward(  # type: ignore[override]
        self,
        x_BSD: torch.Tensor,
        labels_BS: torch.Tensor | None = None,
        loss_mask_BS: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :func:`output_and_loss`."""
        return output_and_loss(self, x_BSD, labels_BS, loss_mask_BS, scale)
