"""Gradient sums over micro-batches, in fp32, and over the data axis while the backward pass still runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gptpar.optim.flat import FlatLayout

BUCKET_ELEMENTS = 25_000_000
"""About 100 MB in fp32: large enough for full bandwidth, small enough to overlap with the backward pass."""


@dataclass
class _Bucket:
    """A contiguous piece of the buffer, reduced as a whole once its last gradient has arrived."""

    start: int
    stop: int
    names: set[str]
    missing: int = 0


class GradientSum:
    """Takes each parameter's gradient as autograd produces it and adds it to a flat buffer.

    Buckets are reduced in the order of the buffer, whatever the order in which they complete: processes match
    collectives by their order alone, and one whose autograd differed would hang or add up the wrong pieces.

    Args:
        parameters: global name -> live parameter; their ``.grad`` is always empty afterwards.
        layout: where each lies.
        buffer: the flat sum, fp32 or wider.
        group: the data-parallel group, or ``None``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: FlatLayout,
        buffer: torch.Tensor,
        group: dist.ProcessGroup | None,
    ):
        self.buffer = buffer
        self.views = layout.views(buffer)
        self._group = group
        self._buckets = _cut(layout)
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._arrived: set[str] = set()
        self._last = False
        self._waiting: deque[_Bucket] = deque()
        self._pending: list[Any] = []
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: self._take(name, p))

    def begin(self) -> None:
        """Start a new sum."""
        self._arrived.clear()
        self._last = False

    def expect_last(self) -> None:
        """The next backward pass is the step's last: reduce each bucket as it and those before it complete."""
        self._last = True
        self._waiting.extend(self._buckets)
        for bucket in self._buckets:
            bucket.missing = len(bucket.names)

    @torch.no_grad()
    def _take(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if name in self._arrived:
            self.views[name].add_(parameter.grad)
        else:
            self.views[name].copy_(parameter.grad)
            self._arrived.add(name)
        parameter.grad = None
        if self._last:
            self._bucket_of[name].missing -= 1
            while self._waiting and self._waiting[0].missing == 0:
                self._reduce(self._waiting.popleft())

    def _reduce(self, bucket: _Bucket) -> None:
        if self._group is not None:
            piece = self.buffer[bucket.start : bucket.stop]
            self._pending.append(dist.all_reduce(piece, group=self._group, async_op=True))

    def finish(self) -> None:
        """Wait until the sum is complete; parameters that got no gradient count as zero."""
        for name in self.views.keys() - self._arrived:
            self.views[name].zero_()
        while self._waiting:
            self._reduce(self._waiting.popleft())
        for work in self._pending:
            work.wait()
        self._pending.clear()


def _cut(layout: FlatLayout) -> list[_Bucket]:
    """Consecutive parameters into buckets of about ``BUCKET_ELEMENTS``."""
    buckets: list[_Bucket] = []
    for name, slot in layout.slots.items():
        if not buckets or slot.stop - buckets[-1].start > BUCKET_ELEMENTS:
            buckets.append(_Bucket(slot.start, slot.stop, set()))
        buckets[-1].names.add(name)
        buckets[-1].stop = slot.stop
    return buckets
