"""``Cost``: what a layer costs, declared beside its code; plan, MFU and partition add it up. Pure.

Amounts are those of one tensor rank, for each token of the micro-batch. So what a rank does for its own tokens alone,
under sequence parallelism, is divided by the number of ranks. Kernels are counted as a compiled layer launches them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class BatchShape(NamedTuple):
    """The micro-batch for which a layer's cost is asked.

    Attributes:
        tokens: of all samples.
        seq_length: tokens of a sample.
        dtype: of weights and activations.
        device_type: ``cuda`` or ``cpu``.
        document_lengths: of documents, whose tokens see their own only, as a sample of them all; ``None``: a sample of
            the corpus is one document.
        rows_of_masks: of a mask of documents, for each of these tokens: with context parallelism by a2a, a process has
            the rows of all processes' tokens.
    """

    tokens: int
    seq_length: int
    dtype: torch.dtype = torch.bfloat16
    device_type: str = "cuda"
    document_lengths: tuple[int, ...] | None = None
    rows_of_masks: int = 1

    @property
    def statistic_size(self) -> int:
        """Bytes of a number that norms and attention keep beside their tensors, such as a mean."""
        return torch.promote_types(self.dtype, torch.float32).itemsize


class Product(NamedTuple):
    """A product of all tokens with a weight.

    Attributes:
        inner, columns: width of input and output on this rank.
        moves_input: whether the tensor axis gathers the input (or holds it whole), and sums its gradient.
        moves_output: whether it sums the output, and gathers the output's gradient (or holds it whole).
    """

    inner: int
    columns: int
    moves_input: bool = False
    moves_output: bool = False


@dataclass(frozen=True)
class Cost:
    """What a layer, or a part of one, costs.

    Attributes:
        products: of the forward pass.
        attention: FLOPs of the forward pass in attention's kernel, for the pairs of tokens that see each other.
        masked: further FLOPs of that kernel, for pairs that a mask in memory hides, or in the time that a slower kernel
            takes.
        forward, backward: elements that norms, sums and activation functions read and write.
        forward_kernels, backward_kernels: number of kernels; the backward's with the addition to the gradient sums.
        exchanged: elements that a token sends to other ranks of the expert axis in each pass.
        small_sums: sums of a few numbers a token over the tensor axis, in forward and backward each.
        kept: bytes that the backward pass needs.
        workspace: bytes of the largest gradient inside the layer.
        chunks: a layer that forms its gradients in the forward pass takes the tokens in this many chunks; 0: another.
        again: bytes are not kept, because the backward pass computes this again.
    """

    products: tuple[Product, ...] = ()
    attention: float = 0.0
    masked: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    forward_kernels: int = 0
    backward_kernels: int = 0
    exchanged: float = 0.0
    small_sums: int = 0
    kept: float = 0.0
    workspace: float = 0.0
    chunks: int = 0
    again: tuple[Cost, ...] = ()

    def __add__(self, other: Cost) -> Cost:
        """Both together."""
        sums = {name: mine + vars(other)[name] for name, mine in vars(self).items()}
        return Cost(**{**sums, "workspace": max(self.workspace, other.workspace)})

    @property
    def flops(self) -> float:
        """FLOPs of a token's forward pass, as MFU counts them; those of the backward pass are twice as many."""
        return 2.0 * sum(product.inner * product.columns for product in self.products) + self.attention

    def computed_again(self, kept: float, *, last: bool = False) -> Cost:
        """The same, where only the input (``kept`` bytes) is kept, and the backward pass computes the rest again.

        Args:
            last: whether the last product is computed again, too; not where nothing but the next layer reads it.
        """
        products = self.products if last else self.products[:-1]
        return replace(self, kept=kept, again=(*self.again, replace(self, products=products)))
