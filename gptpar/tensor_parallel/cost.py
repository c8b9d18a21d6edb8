"""``Cost``: what a layer costs, declared beside its code; plan, MFU and partition add it up. Pure.

Amounts are those of one tensor rank, divided by the number of all tokens of the micro-batch. Under sequence
parallelism, what a rank does for its own tokens alone therefore counts as a fraction: 1 / number of ranks. Kernels are
counted as a compiled layer launches them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class BatchShape(NamedTuple):
    """The micro-batch for which a layer's cost is asked.

    Attributes:
        tokens: number of tokens of all samples.
        seq_length: number of tokens of one sample.
        dtype: number format of weights and activations.
        device_type: ``cuda`` or ``cpu``.
        document_lengths: lengths of typical documents, whose tokens do not see other documents; ``None``: each sample
            is one document.
        rows_of_masks: rows of the document mask for each of these tokens; several with context parallelism by a2a,
            where a process has the rows of all processes' tokens.
        recorded: whether the step is recorded as a CUDA graph.
    """

    tokens: int
    seq_length: int
    dtype: torch.dtype = torch.bfloat16
    device_type: str = "cuda"
    document_lengths: tuple[int, ...] | None = None
    rows_of_masks: int = 1
    recorded: bool = False

    @property
    def statistic_size(self) -> int:
        """Bytes of a number that norms and attention keep beside their tensors, such as a mean."""
        return torch.promote_types(self.dtype, torch.float32).itemsize


class Product(NamedTuple):
    """A product of all tokens with a weight.

    Attributes:
        inner: width of the input on this rank.
        columns: width of the output on this rank.
        moves_input: whether the output features are split, so that the tensor axis sums the input's gradient.
        moves_output: whether the input features are split, so that the tensor axis sums the output.
    """

    inner: int
    columns: int
    moves_input: bool = False
    moves_output: bool = False


@dataclass(frozen=True)
class Cost:
    """What a layer, or a part of one, costs.

    Attributes:
        products: matrix products of the forward pass.
        attention: FLOPs of the forward pass in attention's kernel, for the pairs of tokens that see each other.
        masked: further FLOPs that stand for lost time: those of pairs that a mask in memory hides, or, with a slower
            kernel, those that the fast one would do in the additional time.
        forward: elements that norms, sums and activation functions read and write in the forward pass.
        backward: elements that they read and write in the backward pass.
        forward_kernels: number of kernels of the forward pass.
        backward_kernels: number of kernels of the backward pass, with the addition to the gradient sums.
        exchanged: elements that a token sends to other ranks of the expert axis in each pass.
        small_sums: number of the forward pass's sums over the tensor axis that have a few numbers a token each; the
            backward pass has as many.
        kept: bytes that are kept for the backward pass.
        workspace: bytes of the largest gradient inside the layer.
        chunks: number of chunks of tokens in which a layer forms its gradients during the forward pass; 0: it forms
            them in the backward pass.
        again: costs of what the backward pass computes again, because its bytes are not kept.
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
        """The cost of two parts together."""
        sums = {name: mine + vars(other)[name] for name, mine in vars(self).items()}
        return Cost(**{**sums, "workspace": max(self.workspace, other.workspace)})

    @property
    def flops(self) -> float:
        """FLOPs of a token's forward pass, as MFU counts them; those of the backward pass are twice as many."""
        return 2.0 * sum(product.inner * product.columns for product in self.products) + self.attention

    def computed_again(self, kept: float, *, last: bool = False) -> Cost:
        """The cost under recomputation: only the input (``kept`` bytes) is kept, the backward pass computes the rest.

        Args:
            last: whether the last product is computed again, too. It need not be where only the next layer reads it.
        """
        products = self.products if last else self.products[:-1]
        return replace(self, kept=kept, again=(*self.again, replace(self, products=products)))
