"""An update on the CPU that counts what it is asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gptpar.optim.cpu_adam import CpuAdam
from gptpar.optim.elementwise import Done


@dataclass
class Seen:
    """What the host did: of how many elements, and of those that were open at first."""

    elements: list[int] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)
    half_done: set[int] = field(default_factory=set)


class Counting(CpuAdam):
    """Notes of how many elements it was told to do what."""

    seen = Seen()

    def order(
        self, state: Sequence[torch.Tensor], *args: Any, only: np.ndarray | None = None, **kwargs: Any
    ) -> Callable[[], Done]:
        p = state[0]
        seen, count = self.seen, p.numel() if only is None else int((only[:, 1] - only[:, 0]).sum())
        completes = only is not None and p.data_ptr() in seen.half_done
        (seen.completed if completes else seen.elements).append(count)
        if only is None or completes:
            seen.half_done.discard(p.data_ptr())
        else:
            seen.half_done.add(p.data_ptr())
        return super().order(state, *args, only=only, **kwargs)
