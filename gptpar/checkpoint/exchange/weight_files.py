"""Reads weight files by tensor name: safetensors, and the older ``.bin`` files of ``torch.save``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from gptpar.checkpoint.exchange.safe_pickle import is_whole, load_torch_file
from gptpar.checkpoint.exchange.safetensors_file import NAME_OF, TensorInfo, open_safetensors
from gptpar.errors import CheckpointError, printable


class WeightFile(Protocol):
    """A file that has been opened and checked; tensors are read one by one."""

    @property
    def path(self) -> Path:
        """The file's path."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Number format and shape of each tensor, by name."""

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Read one tensor into ``target``, a view of as many elements."""


@dataclass(frozen=True)
class TorchFile:
    """A dictionary of tensors in a file of ``torch.save``, unpickled with an allow-list; its bytes stay on the disk."""

    path: Path
    values: Mapping[str, torch.Tensor]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Number format and shape of each tensor, in the words of safetensors."""
        return {
            name: TensorInfo(NAME_OF.get(value.dtype, str(value.dtype)), tuple(value.shape))
            for name, value in self.values.items()
        }

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Read one tensor from the disk into ``target``, a view of as many elements."""
        target.copy_(self.values[name].detach().reshape(target.shape))


def open_torch(path: Path) -> TorchFile:
    """Open a ``.bin`` file.

    Raises:
        CheckpointError: the file would run code, is damaged, or holds anything but named tensors.
    """
    content = load_torch_file(path)
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and is_whole(value) for name, value in content.items()
    ):
        raise CheckpointError(f"{path} holds something else than whole tensors by name")
    return TorchFile(path, content)


def open_all(paths: Iterable[Path]) -> dict[str, WeightFile]:
    """Open weight files; returns tensor name -> the file that has the tensor.

    Raises:
        CheckpointError: with all problems of all files; a tensor in two files is a problem, too.
    """
    places: dict[str, WeightFile] = {}
    problems = []
    for path in paths:
        try:
            file: WeightFile = open_torch(path) if path.suffix == ".bin" else open_safetensors(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        names = file.tensors.keys()
        if twice := places.keys() & names:
            problems.append(f"tensor {printable(min(twice))!r} is in {places[min(twice)].path.name} and in {path.name}")
        places |= dict.fromkeys(names, file)
    if problems:
        raise CheckpointError("\n".join(problems))
    return places
