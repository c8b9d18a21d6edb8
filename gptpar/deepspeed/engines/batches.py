"""Calls a module with its micro-batches, and decides how the value that it returns becomes a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gptpar.deepspeed.engines.dataset import RepeatingLoader
from gptpar.engine.tensors import mapped
from gptpar.errors import GptparError, UsageError

LossFunction = Callable[[Any, Any], torch.Tensor]
"""(the module's output, the micro-batch) -> the loss, a scalar."""


Batches = list[Any]
"""A step's micro-batches, their tensors on the device."""


class BatchSource:
    """Takes the micro-batches of each step from an iterator, or from a loader without end.

    Args:
        number: of micro-batches in a step.
        device: where their tensors are copied to.

    Attributes:
        number: as given.
        loader: gives micro-batches where :meth:`take` gets no iterator: an iterator once, a loader from its start
            again after its end; ``None``: none.
    """

    def __init__(self, number: int, device: torch.device):
        self.number, self._device = number, device
        self.loader = None

    @property
    def loader(self) -> Iterable[Any] | None:
        return self._loader

    @loader.setter
    def loader(self, loader: Iterable[Any] | None) -> None:
        self._loader = loader
        self._batches = loader if isinstance(loader, Iterator) else None

    def take(self, data: Iterator[Any] | None, number: int | None = None) -> Batches:
        """A step's micro-batches, or another number of them; copies of their tensors to the device have begun.

        Raises:
            StopIteration: the data is at its end.
            GptparError: the data ends within the step, there is none, or no micro-batch is asked for.
            TypeError: ``data`` is no iterator.
        """
        data = self._own() if data is None else data
        if not isinstance(data, Iterator):
            raise TypeError(
                f"an iterator over micro-batches is needed, not a {type(data).__name__}: call iter(loader) once and "
                "pass that to each step, or every step would begin with the first batch again."
            )
        batches: Batches = []
        wanted = self.number if number is None else number
        if wanted < 1:
            raise GptparError(f"{wanted} micro-batches are asked for: at least one is needed.")
        for taken in range(wanted):
            try:
                batches.append(mapped(next(data), lambda tensor: tensor.to(self._device, non_blocking=True)))
            except StopIteration:
                if not taken:
                    raise
                raise GptparError(
                    f"the data ended after {taken} of the step's {wanted} micro-batches, which were not used: "
                    "let its length be a multiple of gradient_accumulation_steps, or repeat it."
                ) from None
        return batches

    def _own(self) -> Iterator[Any]:
        if self._loader is None:
            raise GptparError("there is no data: pass an iterator, or training_data to gptpar.initialize.")
        self._batches = RepeatingLoader(self._loader) if self._batches is None else self._batches
        return self._batches


def cast_inputs(inputs: Any, dtype: torch.dtype | None) -> Any:
    """Nested inputs with their floating-point tensors cast; ``None``: as they are."""
    if dtype is None:
        return inputs
    return mapped(inputs, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In the block, a module and all inside are in eval mode and form no gradients; then each has its mode again."""
    modes = {inner: inner.training for inner in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for inner, mode in modes.items():
            inner.training = mode


def call_with(module: Callable[..., Any], batch: Any) -> Any:
    """Call a module: a mapping becomes keywords, a tuple or list positional arguments, anything else one argument."""
    if isinstance(batch, Mapping):
        return module(**batch)
    if isinstance(batch, tuple | list):
        return module(*batch)
    return module(batch)


def loss_of(output: Any, batch: Any, loss_fn: LossFunction | None) -> torch.Tensor:
    """[] the loss: what ``loss_fn`` returns; without it the output, its ``loss``, or the first element of a tuple.

    Raises:
        GptparError: this is no scalar.
    """
    loss = _found(output) if loss_fn is None else loss_fn(output, batch)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    if loss_fn is not None:
        raise GptparError(f"loss_fn returned {described(loss)}: a scalar is needed.")
    what = described(output) if loss is output else f"{described(output)} whose loss is {described(loss)}"
    raise GptparError(
        f"the module returned {what}, and a scalar loss is needed: pass gptpar.initialize "
        "loss_fn=lambda output, batch: ..., or let the module return a scalar, an object with .loss, or a tuple that "
        "begins with it."
    )


def _found(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    if hasattr(output, "loss"):
        return output.loss
    return output[0] if isinstance(output, tuple) and output else output


def require_loss(loss: Any) -> None:
    """Check that a backward pass can begin with this loss.

    Raises:
        UsageError: it is no scalar with a gradient.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise UsageError(f"the loss has to be a scalar tensor with a gradient, not {described(loss)}.")


def described(value: Any) -> str:
    """A description of a value, for a sentence."""
    if not isinstance(value, torch.Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    kind = str(value.dtype).removeprefix("torch.")
    return (
        f"a {kind} tensor of shape {tuple(value.shape)} that {'has a' if value.requires_grad else 'requires no'} "
        "gradient"
    )


def mean_of(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """[] the mean, in fp32 or wider."""
    stacked = torch.stack(list(losses))
    return stacked.to(torch.promote_types(stacked.dtype, torch.float32)).mean()
