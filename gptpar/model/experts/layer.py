"""``Experts``: the MLP of a block as a mixture of experts; every token is computed, unless a capacity says less.

Legend: N all tokens (n: this rank's, under sequence parallelism), D model width, E experts, K experts of a token,
M = N * K rows, F this rank's part of an expert's width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from gptpar.model.experts.dispatch import ALL_EXPERTS, LIMIT, ExpertAxis, crossing_cost, on_their_ranks, sent_to_all
from gptpar.model.experts.products import (
    PLACE_BYTES,
    Places,
    combined,
    grouped_product,
    places_of,
    scattered,
    with_biases,
)
from gptpar.model.experts.routing import Router
from gptpar.model.linear import Linears
from gptpar.model.mup import hidden_std, router_std
from gptpar.tensor_parallel.axis import copy_to, gather_tokens, scatter_sum_tokens, sum_over
from gptpar.tensor_parallel.cost import BatchShape, Cost, Product
from gptpar.topology.initial_values import Constant, Normal
from gptpar.topology.placement import ParameterSpec


class Experts(nn.Module):
    """The weighted sum of the outputs of each token's K best experts, and of an expert that all tokens share.

    Tensor ranks split the width of every expert. Each rank of the expert axis has some of the experts.

    Args:
        linears: makes the linear layers of the block.
        activate: a function of the first product, M x 2F with a gate, else M x F; returns the second's input, M x F.
        shared: the shared expert; ``None``: there is none.
        placed: this process's place on the expert axis.

    Attributes:
        reads_last_product: whether the backward pass needs the output of the last product.
    """

    unsummed_bias = None
    """Experts form the gradients of their biases themselves."""

    def __init__(
        self,
        linears: Linears,
        activate: Callable[[torch.Tensor], torch.Tensor],
        shared: nn.Module | None,
        placed: ExpertAxis = ALL_EXPERTS,
    ):
        super().__init__()
        config, axis = linears.config, linears.axis
        self.axis, self.placed, self.activate, self.num_experts = axis, placed, activate, config.num_experts
        self.topk = config.moe_router_topk
        width, inner = config.hidden_size, config.width_of_experts(config.ffn_hidden_size)
        own, parts = inner // axis.size, 2 if config.gated else 1
        std = hidden_std(config)
        down_std = std / (2 * config.num_layers) ** 0.5
        self.declared = {
            "up": ParameterSpec(Normal(std), axis.split(2, inner) | placed.split(config.num_experts)),
            "down": ParameterSpec(Normal(down_std), axis.split(2, inner) | placed.split(config.num_experts)),
            "gate": ParameterSpec(Normal(router_std(config)), axis.between_layers),
        }
        if config.add_bias_linear:
            # Each tensor rank adds an equal part of the second bias to its part of the output's sum.
            of_rank = axis.inside_layers | placed.split(config.num_experts)
            self.declared["up_bias"] = ParameterSpec(Constant(0.0), self.declared["up"].placement)
            self.declared["down_bias"] = ParameterSpec(Constant(0.0), of_rank)
        self.router = Router(config, axis)
        num_here = config.num_experts // placed.size
        self.up = nn.Parameter(torch.empty(num_here, parts, own, width))
        self.down = nn.Parameter(torch.empty(num_here, width, own))
        self.up_bias = nn.Parameter(torch.empty(num_here, parts, own)) if config.add_bias_linear else None
        self.down_bias = nn.Parameter(torch.empty(num_here, width)) if config.add_bias_linear else None
        self.shared = shared
        self.gate = nn.Parameter(torch.empty(1, width)) if config.moe_shared_expert_gate else None
        self.reads_last_product = shared is None or self.gate is not None

    @property
    def idle_parameters(self) -> int:
        """Parameters of the experts to which a token does not go."""
        own = [self.up, self.down, self.up_bias, self.down_bias]
        of_all = sum(parameter.numel() for parameter in own if parameter is not None)
        return of_all // len(self.up) * (self.num_experts - self.topk)

    def forward(
        self, x_nD: torch.Tensor, seq_length: int, choice_NK: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Returns (y_nD, auxiliary losses by name).

        Args:
            seq_length: number of tokens of a sequence.
            choice_NK: keeps the experts that are chosen; see :meth:`Router.forward`.
        """
        axis = self.axis
        x_ND = (gather_tokens if axis.splits_tokens else copy_to)(x_nD, axis)
        sent = sent_to_all(x_ND, self.placed, self.topk) if self.placed.size > 1 else None
        routed = self.router(x_ND, seq_length, choice_NK)
        if self.placed.size > 1:
            how = self.num_experts, self.placed, self._weighted_sum
            y_ND = on_their_ranks(x_ND, sent, routed.weights_NK, routed.chosen_NK, *how)
        else:
            places = places_of(routed.chosen_NK, self.num_experts, has_none=self.router.drops_tokens)
            y_ND = self._weighted_sum(x_ND, routed.weights_NK, places)
        y_nD = (scatter_sum_tokens if axis.splits_tokens else sum_over)(y_ND, axis)
        if self.shared is not None:
            shared_nD = self.shared(x_nD)
            y_nD = y_nD + (shared_nD if self.gate is None else shared_nD * (x_nD @ self.gate.t()).sigmoid())
        return y_nD, routed.losses

    def _weighted_sum(self, x_ND: torch.Tensor, weights_NK: torch.Tensor, places: Places) -> torch.Tensor:
        """Over the outputs of those of each token's experts that this rank has."""
        up_MF = grouped_product(scattered(x_ND, places), self.up.flatten(1, 2), places.counts_E)
        if self.up_bias is not None:
            up_MF = with_biases(up_MF, self.up_bias.flatten(1), places.counts_E)
        y_MD = grouped_product(self.activate(up_MF), self.down, places.counts_E)
        if self.down_bias is not None:
            y_MD = with_biases(y_MD, self.down_bias / self.axis.size, places.counts_E)
        return combined(y_MD, weights_NK, places)

    def cost(self, batch: BatchShape) -> Cost:
        """The router, and the products of K experts for each token; a compiler computes a gate again."""
        (_, parts, inner, width), size, k = self.up.shape, batch.dtype.itemsize, self.topk
        columns, is_split = k * parts * inner, self.axis.size > 1
        rows = k * (LIMIT if batch.recorded and self.placed.size > 1 else 1)  # that buffers have room for
        products = (
            Product(width, self.num_experts),
            Product(width, columns, moves_input=is_split),
            Product(k * inner, width, moves_output=is_split),
        )
        # Tokens; copies of them, the outputs of both products, and the activation function's; places of the copies.
        kept = (width + 2 * rows * width + rows * (parts + 1) * inner) * size + PLACE_BYTES * k
        kept += self.router.kept(batch)
        # Copies are written and read, and their outputs summed; the activation function reads and writes.
        moved = 2 * rows * (width + parts * inner) + (k + 1) * width
        if self.up_bias is not None:  # outputs of both products are read and written once more
            moved += 2 * rows * (width + parts * inner)
        cost = Cost(products, forward=moved, backward=2 * moved, kept=kept, workspace=rows * width * size)
        if self.placed.size > 1:
            cost += crossing_cost(self.placed.size, k, width, batch)
        if self.shared is None:
            return cost
        shared = cast(Any, self.shared).cost(batch)
        shared = replace(shared, kept=shared.kept - width * size)  # its input is the experts', too
        if self.gate is None:
            return cost + shared
        return cost + shared + Cost((Product(width, 1),), kept=(width + 1) * size)
