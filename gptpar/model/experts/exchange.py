"""Rows of tokens that the ranks of the expert axis send to each other, while the device goes on.

A rank's tensor of tokens begins with its own rows, which are in no message; those of other ranks follow. Sending them
back is the transpose, and so is the backward pass. A transfer is two nodes of autograd: one begins it, the other waits
for it. What a layer computes between them, in the forward or in the backward pass, hides the messages.

Legend: P ranks, N own rows, S rows that this rank sends, A = N + those that arrive, D width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Messages(NamedTuple):
    """How many rows go to each rank and come from it; a rank sends none to itself.

    Attributes:
        num_own: N.
        num_sent, num_got: rows of the buffers for what is sent and what arrives; the last rows may be in no message.
    """

    sent: list[int]
    got: list[int]
    num_own: int
    num_sent: int
    num_got: int
    group: Any

    @property
    def num_filled(self) -> int:
        """Rows of a tensor [A, D] that hold tokens."""
        return self.num_own + sum(self.got)


class Exchange:
    """One transfer of tokens between ranks, in the forward pass, and of their gradients, in the backward pass.

    A transfer to the experts calls ``send`` and ``arrived`` forward, ``send_back`` and ``came_back`` backward. The
    transfer of their outputs calls ``send_back`` and ``came_back`` forward, ``send`` and ``arrived`` backward.
    """

    def __init__(self, messages: Messages):
        self._messages = messages
        self._work: Any = None
        self._coming: torch.Tensor | None = None

    def send(self, own_ND: torch.Tensor, sent_SD: torch.Tensor) -> torch.Tensor:
        """[A, D], whose own rows are there, and whose others are when :meth:`arrived` returns."""
        m = self._messages
        all_AD = own_ND.new_empty(m.num_own + m.num_got, *own_ND.shape[1:])
        self._begin(all_AD[m.num_own : m.num_filled], sent_SD[: sum(m.sent)], m.got, m.sent)
        all_AD[: m.num_own] = own_ND
        return all_AD

    def arrived(self) -> None:
        """Let the device wait for the transfer that has begun."""
        self._work.wait()
        self._work = None

    def send_back(self, all_AD: torch.Tensor) -> None:
        """Begin to send rows back to the ranks that they came from."""
        m = self._messages
        self._coming = all_AD.new_empty(m.num_sent, *all_AD.shape[1:])
        self._begin(self._coming[: sum(m.sent)], all_AD[m.num_own : m.num_filled], m.sent, m.got)

    def came_back(self) -> torch.Tensor:
        """[S, D], what other ranks have sent back."""
        self.arrived()
        coming, self._coming = self._coming, None
        assert coming is not None
        return coming

    def _begin(self, into: torch.Tensor, rows: torch.Tensor, got: list[int], sent: list[int]) -> None:
        rows, group = rows.contiguous(), self._messages.group
        self._work = dist.all_to_all_single(into, rows, got, sent, group=group, async_op=True)

    @property
    def num_own(self) -> int:
        """N."""
        return self._messages.num_own


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, own_ND: torch.Tensor, sent_SD: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return exchange.send(own_ND, sent_SD)

    @staticmethod
    def backward(ctx: Any, grad_AD: torch.Tensor) -> Any:  # type: ignore[override]
        return None, grad_AD[: ctx.exchange.num_own], ctx.exchange.came_back()


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, all_AD: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.arrived()
        return all_AD

    @staticmethod
    def backward(ctx: Any, grad_AD: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.exchange.send_back(grad_AD)
        return None, grad_AD


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, all_AD: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.send_back(all_AD)
        return all_AD

    @staticmethod
    def backward(ctx: Any, grad_AD: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.exchange.arrived()
        return None, grad_AD


class _CameBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, all_AD: torch.Tensor) -> Any:
        ctx.exchange = exchange
        return all_AD[: exchange.num_own], exchange.came_back()

    @staticmethod
    def backward(ctx: Any, own_ND: torch.Tensor, sent_SD: torch.Tensor) -> Any:  # type: ignore[override]
        return None, ctx.exchange.send(own_ND, sent_SD)


def sending(messages: Messages, own_ND: torch.Tensor, sent_SD: torch.Tensor) -> tuple[Exchange, torch.Tensor]:
    """Begin to send rows; :func:`arrived` takes the two, in the order of these calls on all ranks."""
    exchange = Exchange(messages)
    return exchange, _Send.apply(exchange, own_ND, sent_SD)


def arrived(exchange: Exchange, all_AD: torch.Tensor) -> torch.Tensor:
    """[A, D] own rows, and those of other ranks, which have arrived."""
    return _Arrived.apply(exchange, all_AD)


def sent_back(messages: Messages, all_AD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """([N, D] own rows, [S, D] what other ranks send back)."""
    exchange = Exchange(messages)
    return _CameBack.apply(exchange, _SendBack.apply(exchange, all_AD))
