"""Losses that layers return beside their outputs, for instance for a router's balance or against large logits.

A layer whose specification names its ``auxiliary_losses`` returns ``(output, {name: scalar})``. Training then minimises
the mean, over micro-batches and processes, of the last layer's loss plus all these scalars. Each is a mean over the
tokens that the layer was given: processes with other samples, or under sequence parallelism with other tokens, count
equally.

A scalar's gradient joins the backward pass at its layer's output, together with the output's own gradient. So it is
never sent between stages. At that time a recomputed layer has its activations again, and its parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gptpar.errors import GptparError


class AuxiliaryLosses:
    """Puts the auxiliary losses of one process's layers into the backward pass, and sums their values.

    Args:
        names: of all layers' losses, also on other processes.
        token_splits: number of tensor ranks that divide the tokens between layers (sequence parallelism).
    """

    def __init__(self, names: Sequence[str] = (), token_splits: int = 1):
        self.names = tuple(dict.fromkeys(names))
        self._token_splits = token_splits
        self._count = 1
        self._grad: torch.Tensor | None = None
        self._totals: dict[str, torch.Tensor] = {}

    def begin(self, num_micro_batches: int, grad: torch.Tensor | None) -> None:
        """Begin a step or an evaluation: set the sums to zero.

        Args:
            num_micro_batches: of the step.
            grad: incoming gradient of each micro-batch's loss, hence of its auxiliary losses; ``None``: 1.
        """
        self._count, self._grad = num_micro_batches, grad
        for total in self._totals.values():
            total.zero_()

    def call(self, layer: Callable[..., Any], names: Sequence[str], x: torch.Tensor, *args: Any) -> torch.Tensor:
        """Call a layer that returns auxiliary losses; returns its output, whose backward pass covers these, too.

        Args:
            layer: called as ``layer(x, *args)``.
            names: of its auxiliary losses.

        Raises:
            GptparError: it did not return an output and losses of these names.
        """
        returned = layer(x, *args)
        _check(returned, names, layer)
        output, losses = returned
        values = [losses[name] for name in names]
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (output, *values)):
            return _Attached.apply(output, self, names, *values)
        self.add(names, values)
        return output

    def add(self, names: Sequence[str], values: Sequence[torch.Tensor]) -> None:
        """Add a layer's values for one micro-batch to the sums."""
        for name, value in zip(names, values, strict=True):
            if name not in self._totals:  # in memory that lives on, because replays of a recorded step write to it
                self._totals[name] = torch.zeros((), dtype=torch.float64, device=value.device)
            self._totals[name] += value.detach()

    def gradient_of(self, value: torch.Tensor) -> torch.Tensor:
        """The incoming gradient of an auxiliary loss."""
        grad = torch.ones_like(value) if self._grad is None else self._grad.to(value.dtype)
        return grad / self._token_splits if self._token_splits > 1 else grad

    def means(self, device: torch.device) -> list[torch.Tensor]:
        """The sum of each of ``names`` over this process's layers, averaged over its micro-batches; fp64 scalars."""
        zero = torch.zeros((len(self.names),), dtype=torch.float64, device=device) if self.names else ()
        return [self._totals.get(name, none) / self._count for name, none in zip(self.names, zero, strict=True)]


class _Attached(torch.autograd.Function):
    """A layer's output; its backward pass also returns the gradients of the layer's auxiliary losses."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, owner: AuxiliaryLosses, names: Sequence[str], *values: torch.Tensor
    ) -> torch.Tensor:
        ctx.owner, ctx.names = owner, names
        ctx.save_for_backward(*values)
        return output.detach()  # the same memory, but not a view: a stage frees the memory of an output that it sent

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        # Values are added up here and not in the forward pass, which a recomputed layer runs twice.
        values = ctx.saved_tensors
        ctx.owner.add(ctx.names, values)
        return grad, None, None, *map(ctx.owner.gradient_of, values)


def _check(returned: Any, names: Sequence[str], layer: Any) -> None:
    """Check that a layer returned its auxiliary losses.

    Raises:
        GptparError: it did not; the message says how to return them.
    """
    pair = isinstance(returned, tuple) and len(returned) == 2
    losses = returned[1] if pair else None
    if not isinstance(losses, Mapping) or set(losses) != set(names):
        got = f"losses {sorted(losses)}" if isinstance(losses, Mapping) else type(returned).__name__
        raise GptparError(
            f"{type(layer).__name__} returned {got}, but its LayerSpec names the auxiliary losses {list(names)}: "
            "return (output, {name: scalar, ...}) with these names."
        )
    for name, value in losses.items():
        if value.dim() or torch.promote_types(value.dtype, torch.float32) != value.dtype:
            raise GptparError(
                f"auxiliary loss {name!r} of {type(layer).__name__} is a {value.dtype} tensor {list(value.shape)}: "
                "return a scalar in fp32 or wider, for example x.float().square().mean()."
            )
