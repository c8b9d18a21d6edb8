"""Sends and receives tensors between neighbouring stages."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from gptpar.topology.groups import Link, Links


class Arrival:
    """A tensor that is being received."""

    def __init__(self, link: Link, shape: torch.Size, dtype: torch.dtype, device: torch.device):
        self._tensor = torch.empty(shape, dtype=dtype, device=device)
        self._work = dist.irecv(self._tensor, link.peer, group=link.group)

    def take(self) -> torch.Tensor:
        """The tensor. On a GPU later work of the current stream waits for its arrival, not the host."""
        assert self._work is not None
        self._work.wait()
        return self._tensor


class Transport:
    """Sends tensors without waiting, and keeps each alive until it is sent."""

    def __init__(self, links: Links):
        self.links = links
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, link: Link, tensor: torch.Tensor) -> None:
        """Start sending."""
        tensor = tensor.contiguous()
        self._leaving.append((dist.isend(tensor, link.peer, group=link.group), tensor))
        # While a step is recorded, nothing is sent, so no send is complete.
        recording = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
        while tensor.is_cuda and not recording and self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def flush(self) -> None:
        """Wait for all sends. On a GPU the current stream waits, not the host."""
        while self._leaving:
            self._leaving.popleft()[0].wait()
