"""Counts NaN and infinite values in weights as they stream from another program's files into a model."""

from __future__ import annotations

from pathlib import Path

import torch

from gptpar.errors import CheckpointError

MAX_LISTED = 8


class Finite:
    """What is not finite in the tensors of a conversion; threads may look at the same time."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], tuple[int, int]] = {}

    def look(self, name: str, start: int, values: torch.Tensor) -> None:
        """Note what is wrong with elements of a tensor; a piece that is read again counts once.

        Args:
            name: of the tensor in its file.
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
        told = [
            f"tensor {name!r} has {nans:,} NaN and {infinite:,} infinite values"
            for name, (nans, infinite) in tensors.items()
        ]
        more = [f"and {len(told) - MAX_LISTED} more tensors"] * (len(told) > MAX_LISTED)
        remedy = "take weights from before the training failed, or copy or download the files again"
        raise CheckpointError(
            "\n".join([f"{source} has weights that no model can compute with:", *told[:MAX_LISTED], *more, remedy])
        )
