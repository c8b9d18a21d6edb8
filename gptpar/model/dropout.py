"""Draws dropout masks that are the same in every layout.

A mask is a function of (seed, iteration, place of the micro-batch in the global batch, layer, kind, global token or
head). It does not depend on how many processes split a layer, on the layer's stage, or on whether the layer is compiled
or recomputed. There is no random generator with a state: each layer gets its seeds with the micro-batch, and a hash of
(seed, row, column) says which elements are kept.

The hash takes 11 integer operations for each element. In a compiled layer they are part of the kernel that reads the
hidden states; otherwise each operation is a pass over memory, 4 bytes for each element. Without dropout there are no
seeds and no hash is computed.

Legend: N tokens of this rank, D model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from gptpar.model.layer_spec import LayerSpec
from gptpar.system.hashes import FIRST, SECOND, fold, mixed, seed_of
from gptpar.tensor_parallel import ALONE, TensorAxis

EMBEDDINGS, PROBABILITIES, ATTENTION_OUTPUT, MLP_OUTPUT = range(4)
KINDS = ("embeddings", "attention probabilities", "attention output", "MLP output")
"""What dropout is applied to in a layer; the constants above are positions in this list."""
NO_SEEDS = "dropout needs its layer's seeds: see gptpar.model.dropout.seed_fields"


class LayerSeeds(NamedTuple):
    """One layer's seeds for one micro-batch, in the order of ``KINDS``.

    They are tensors because a compiled layer would be compiled again for every new Python number.

    Attributes:
        host: int64 [kinds], on the CPU.
        words: int32 [kinds, 2], the two halves of each of these seeds, on the model's device.
        rows: int32 [N], the global numbers of the tokens, if this process's are not all of the micro-batch's.
    """

    host: torch.Tensor
    words: torch.Tensor
    rows: torch.Tensor | None = None


def seeds_field(layer: str) -> str:
    """Name of the micro-batch's field with a layer's :class:`LayerSeeds`."""
    return f"dropout seeds of {layer}"


def layers_with_dropout(specs: Iterable[LayerSpec]) -> list[str]:
    """Names of the layers that need seeds."""
    return [spec.name for spec in specs if seeds_field(spec.name) in spec.batch_fields]


def seed_fields(
    layers: Sequence[str], seed: int, iteration: int, place: int, device: torch.device, rows: torch.Tensor | None = None
) -> dict[str, LayerSeeds]:
    """Name of the field -> seeds of a layer, for one micro-batch.

    Args:
        layers: names of layers.
        seed: the run's seed.
        place: the micro-batch's position in the global batch.
        device: the model's device.
        rows: see :class:`LayerSeeds`.
    """
    seeds = [seed_of(seed, "dropout", iteration, place, layer, kind) for layer in layers for kind in KINDS]
    host = torch.tensor(seeds, dtype=torch.int64).view(len(layers), len(KINDS))
    words = host.view(torch.int32).view(*host.shape, 2).to(device, non_blocking=True)
    return {seeds_field(layer): LayerSeeds(host[i], words[i], rows) for i, layer in enumerate(layers)}


def kept(words: torch.Tensor, rows: torch.Tensor, num_columns: int, p: float) -> torch.Tensor:
    """Which elements dropout keeps: bool [*rows.shape, num_columns], each False with probability ``p``.

    Args:
        words: int32 [2], the halves of a seed.
        rows: int32 of any shape, the global numbers of the rows.
        num_columns: elements of each row.
        p: probability that an element is dropped.
    """
    low, high = words.unbind()
    # Each row has a key of 64 bits: of 32 bits, two rows would rather often have the same.
    key = mixed(mixed(rows ^ low) + high)[..., None]
    other_key = mixed(mixed(rows + high) ^ low)[..., None]
    columns = torch.arange(num_columns, dtype=torch.int32, device=rows.device)
    x = fold(columns ^ key, 16).mul_(FIRST).add_(other_key)
    x = fold(x, 15).mul_(SECOND)
    return x >= min(round(p * 2**32), 2**32 - 1) - 2**31


class HiddenDropout(nn.Module):
    """Dropout of hidden states.

    Args:
        p: probability that an element is dropped.
        kind: which of the layer's seeds it uses, an index into ``KINDS``.
        axis: this process's place on the tensor axis; under sequence parallelism it holds some of the tokens.
    """

    def __init__(self, p: float, kind: int, axis: TensorAxis = ALONE):
        super().__init__()
        self.p, self.kind = p, kind
        self.rank = axis.rank if axis.splits_tokens else 0

    def forward(self, x_ND: torch.Tensor, seeds: LayerSeeds | None) -> torch.Tensor:
        """Same shape as ``x``; seeds may be missing outside training."""
        if not (self.training and self.p):
            return x_ND
        assert seeds is not None, NO_SEEDS
        num_tokens, width = x_ND.shape
        first = self.rank * num_tokens  # all ranks hold the same number of tokens
        if seeds.rows is None:
            rows_N = torch.arange(first, first + num_tokens, dtype=torch.int32, device=x_ND.device)
        else:
            rows_N = seeds.rows[first : first + num_tokens]
        kept_ND = kept(seeds.words[self.kind], rows_N, width, self.p)
        return torch.where(kept_ND, x_ND * (1 / (1 - self.p)), 0.0)
