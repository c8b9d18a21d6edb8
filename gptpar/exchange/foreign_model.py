"""``ForeignModel``: what a reader of another program's format gives, so that a checkpoint can be made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint.streamed import StreamedCheckpoint
from gptpar.config import ModelConfig, TokenizerConfig
from gptpar.errors import CheckpointError

CONVERTED = "converted"
"""The tokenizer type of a checkpoint that stores only the vocabulary's size."""

MAX_LISTED = 8
"""Tensors that an error names."""


@dataclass(frozen=True)
class ForeignModel:
    """A model whose files have been opened; each tensor is there and has the right shape.

    Attributes:
        meta: the meta data of the checkpoint to be made; with ``progress`` a run can go on from it.
        write: writes all tensors of the checkpoint.
        tokenizer: name -> contents of the tokenizer's files.
        keep: copies into the new folder the files that a later export returns.
    """

    meta: dict[str, Any]
    write: Callable[[StreamedCheckpoint], None]
    tokenizer: Mapping[str, bytes] | None = None
    keep: Callable[[Path], None] = lambda folder: None


def converted_meta(model: ModelConfig, tokenizer: TokenizerConfig, source: str, **identity: Any) -> dict[str, Any]:
    """The meta of a converted checkpoint: enough to make text, to export, and to begin a run with --finetune.

    Args:
        source: the program that it comes from.
        identity: the tokenizer's identity, as far as it is known: ``vocab_size``, the number of its token ids, and
            ``sha256`` of its files, as ``digests_of`` gives them.
    """
    return {
        "config": {"model": dataclasses.asdict(model), "tokenizer": dataclasses.asdict(tokenizer)},
        "tokenizer": {"type": CONVERTED, **{name: value for name, value in identity.items() if value}},
        "converted_from": source,
    }


class Finite:
    """Counts numbers that are not finite in the tensors of a conversion; threads may do so at the same time."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], tuple[int, int]] = {}

    def look(self, name: str, start: int, values: torch.Tensor) -> None:
        """Note what is wrong with elements of a tensor; a piece that is read again counts once.

        Args:
            name: the tensor's name in its file.
            start: number of the first element.
        """
        if values.numel() and not all(torch.isfinite(end) for end in torch.aminmax(values)):  # which pass on NaN
            self._found[name, start] = int(values.isnan().sum()), int(values.isinf().sum())

    def require(self, source: Path) -> None:
        """Refuse what was seen.

        Raises:
            CheckpointError: there were values that are not finite; with each tensor's name and their number.
        """
        tensors: dict[str, tuple[int, int]] = {}
        for (name, _), (nans, infinite) in sorted(self._found.items()):
            before = tensors.get(name, (0, 0))
            tensors[name] = before[0] + nans, before[1] + infinite
        if not tensors:
            return
        lines = [
            f"tensor {name!r} has {nans:,} NaN and {infinite:,} infinite values"
            for name, (nans, infinite) in tensors.items()
        ]
        more = [f"and {len(lines) - MAX_LISTED} more tensors"] * (len(lines) > MAX_LISTED)
        remedy = "take weights from before the training failed, or copy or download the files again"
        raise CheckpointError(
            "\n".join([f"{source} has weights that no model can compute with:", *lines[:MAX_LISTED], *more, remedy])
        )
