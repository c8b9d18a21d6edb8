"""Context-parallel ranks that gather keys and values, one after the other in one process."""

from typing import Any

import pytest
import torch

import gptpar.context_parallel as context_parallel
from gptpar.context_parallel import ContextSplit


class OneByOne:
    """Ranks one after the other: each gets the keys and values of all, and adds to the gradients of all."""

    def __init__(self, size: int, k_BGSK: torch.Tensor, v_BGSK: torch.Tensor):
        self.splits = [ContextSplit(size, rank, True) for rank in range(size)]
        places = [split.places(1, k_BGSK.shape[2])[0] for split in self.splits]
        of_ranks = [torch.stack([k_BGSK, v_BGSK])[:, :, :, mine] for mine in places]
        self._own = torch.stack(of_ranks).transpose(3, 4).unflatten(3, (2, -1))  # [c, 2, B, 2, T / 2, G, K]
        self.grads, self.rank, self._groups = torch.zeros_like(self._own), 0, slice(0)

    def size(self) -> int:
        return len(self.splits)

    def exchange(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the places of the collectives."""
        monkeypatch.setattr(context_parallel, "gather", self.gather)
        monkeypatch.setattr(context_parallel, "reduce_scatter", self.reduce_scatter)

    def gradients(self) -> torch.Tensor:
        """Those of k_BGSK and v_BGSK, as all ranks' backward passes have added them up."""
        of_ranks = self.grads.flatten(3, 4).transpose(3, 4)
        whole = torch.empty_like(torch.cat([*of_ranks], 3))
        for split, mine in zip(self.splits, of_ranks, strict=True):
            whole[:, :, :, split.places(1, whole.shape[3])[0]] = mine
        return whole

    def gather(self, own: torch.Tensor, group: Any) -> torch.Tensor:
        count, mine = own.shape[-2], self._own[self.rank]
        (first,) = (i for i in range(mine.shape[-2]) if torch.equal(mine[..., i : i + count, :], own[0]))
        self._groups = slice(first, first + count)
        return self._own[..., self._groups, :]

    def reduce_scatter(self, grads: torch.Tensor, group: Any) -> torch.Tensor:
        self.grads[..., self._groups, :] += grads
        return grads[self.rank : self.rank + 1]
