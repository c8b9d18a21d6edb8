"""Describes a save: its request (``Save``), the state that it takes later (``Late``), and its result (``Saved``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gptpar.topology.tensor_parts import TensorParts


@dataclass(frozen=True)
class Late:
    """State in host memory that a save takes after its begin.

    Attributes:
        blocks: the memory.
        tensors: finds the parts of tensors in it.
    """

    blocks: Sequence[torch.Tensor]
    tensors: Callable[[], Mapping[str, TensorParts]]


@dataclass(frozen=True)
class Save:
    """A save's state, folder and conditions.

    Attributes:
        folder: the folder of checkpoints to save into.
        iteration: the iteration of the state.
        tensors: this process's parts as they are now, but for those of ``late``, which are taken later.
        write: ``save_checkpoint`` with all arguments given but ``tensors``, ``process_group``, ``snapshot``, ``moved``.
        permit: raises ``FolderTakenError``, on the main process, if the folder is another run's.
        files_in_memory: files that the save puts into host memory per process; each is as large as a process's own.
        optional: whether training goes on however often the save fails.
        unguarded: whether a part may be overwritten without asking the guard first; such a part is cloned at once.
        late: returns the state in host memory once the last step has updated it; ``None``: there is none.
        late_bytes: bytes of that state.
    """

    folder: Path
    iteration: int
    tensors: Mapping[str, TensorParts]
    write: Callable[..., Path]
    permit: Callable[[], None] = lambda: None
    files_in_memory: int = 0
    optional: bool = False
    unguarded: Callable[[torch.Tensor], bool] = lambda part: False
    late: Callable[[], Late] | None = None
    late_bytes: int = 0


@dataclass(frozen=True)
class Saved:
    """A save that is on the disk.

    Attributes:
        stood_s: seconds that training lost: it stood still, or a step waited for the save.
        written_s: seconds from the save's begin to its end.
        most_kept: peak bytes of host memory that held parts overwritten during the save.
        cloned: whether parts on the GPU were cloned there.
    """

    save: Save
    path: Path
    stood_s: float
    written_s: float
    most_kept: int
    cloned: bool
