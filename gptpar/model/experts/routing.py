"""The router: which experts each token goes to, with which weights, and the losses that balance them.

The choice is made once. It is kept with the micro-batch (:func:`no_choice`), so that a layer that is computed again in
the backward pass takes the same experts, and so that choices are counted after the passes of a step. A layer writes to
nothing else: the backward pass of a compiled layer finds its inputs as they were. Experts are chosen by score, and at
equal scores by their number. A bias for balance enters the choice, and no weight.

Losses are means over sequences, or over the tokens of the whole step, so that they depend neither on the micro-batch's
size nor on the layout; only the loss that balances each micro-batch depends on its size.

Legend: N tokens, D width, E experts, K experts of a token, B sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from gptpar.config import ModelConfig
from gptpar.config.sections.mlp import OF_SEQUENCE, OF_STEP
from gptpar.model.core_attention import not_compiled
from gptpar.model.dtypes import in_parts
from gptpar.model.mup import router_std
from gptpar.tensor_parallel import TensorAxis
from gptpar.tensor_parallel.cost import BatchShape
from gptpar.topology.initial_values import Constant, Normal
from gptpar.topology.placement import ParameterSpec

BALANCE_LOSS, Z_LOSS = "expert balance loss", "router z-loss"


NOT_CHOSEN = torch.iinfo(torch.int16).min


def no_choice(num_tokens: int, topk: int, device: torch.device) -> torch.Tensor:
    """int16 [N, K]: memory for the experts that a layer chooses for a micro-batch of training."""
    return torch.full((num_tokens, topk), NOT_CHOSEN, dtype=torch.int16, device=device)


Surplus = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From (best_NK, the scores judged_NE) to best_NK, with ``~expert`` where a full expert does not take a token."""


def chosen_experts(
    judged_NE: torch.Tensor, choice_NK: torch.Tensor, groups: Sequence[int], drop: Surplus | None = None
) -> torch.Tensor:
    """int64 [N, K], the best experts; what ``choice_NK`` holds, if it holds a choice.

    A token that a full expert does not take has ``~expert``, a negative number, instead. The device decides which, so
    that a layer is the same program whether it is computed for the first time or again.

    Args:
        judged_NE: scores.
        choice_NK: int16, takes the choice.
        groups: see :func:`best_experts`.
        drop: drops what a full expert does not take; ``None``: experts take every token.
    """
    is_kept = choice_NK[:1, :1] != NOT_CHOSEN
    best_NK = best_experts(judged_NE, choice_NK.shape[1], groups)
    if drop is not None:
        best_NK = drop(best_NK, judged_NE)
    chosen_NK = torch.where(is_kept, choice_NK.long(), best_NK)
    choice_NK.copy_(chosen_NK)
    return chosen_NK


@torch.library.custom_op("gptpar::choose_experts", mutates_args=("choice_NK",))
def choose_experts(
    judged_NE: torch.Tensor,
    choice_NK: torch.Tensor,
    groups: list[int],
    seq_length: int = 0,
    capacity: int = 0,
    by_position: bool = False,
) -> torch.Tensor:
    """As :func:`chosen_experts`, of whole sequences, in compiled layers.

    Args:
        judged_NE, choice_NK, groups: see there.
        seq_length, capacity, by_position: see :func:`without_surplus`; a capacity of 0 is none.
    """
    drop = partial(without_surplus, seq_length=seq_length, capacity=capacity, by_position=by_position)
    return chosen_experts(judged_NE, choice_NK, groups, drop if capacity else None)


@choose_experts.register_fake
def _(judged_NE: torch.Tensor, choice_NK: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty_like(choice_NK, dtype=torch.int64)


@not_compiled
def _chosen_with_others(
    judged_NE: torch.Tensor,
    choice_NK: torch.Tensor,
    groups: list[int],
    seq_length: int,
    capacity: int,
    by_position: bool,
    context: ContextRanks,
) -> torch.Tensor:
    """As :func:`choose_experts`, where other ranks have tokens of the same sequences."""
    how: dict[str, Any] = {"seq_length": seq_length, "capacity": capacity, "by_position": by_position}
    return chosen_experts(judged_NE, choice_NK, groups, partial(without_surplus, context=context, **how))


def best_experts(judged_NE: torch.Tensor, topk: int, groups: Sequence[int] = ()) -> torch.Tensor:
    """int64 [N, K], by score, and at equal scores by number; ``torch.topk`` promises nothing of equal ones.

    Args:
        groups: (number of groups of experts, number of these that a token may use); empty: experts are not grouped.
            Groups are judged by the sum of the scores of their best K / (groups of a token) experts, as in DeepSeek-V3.
    """
    if groups:
        num_groups, num_used = groups
        grouped_NGe = judged_NE.unflatten(1, (num_groups, -1))
        sums_NG = grouped_NGe.sort(dim=-1, descending=True).values[..., : topk // num_used].sum(-1)
        used_NU = sums_NG.sort(dim=-1, descending=True, stable=True).indices[:, :num_used]
        is_used_NG = torch.zeros_like(sums_NG, dtype=torch.bool).scatter_(1, used_NU, True)
        judged_NE = grouped_NGe.masked_fill(~is_used_NG[..., None], -torch.inf).flatten(1)
    return judged_NE.sort(dim=-1, descending=True, stable=True).indices[:, :topk].contiguous()


def without_surplus(
    best_NK: torch.Tensor,
    judged_NE: torch.Tensor,
    seq_length: int,
    capacity: int,
    *,
    by_position: bool,
    context: ContextRanks | None = None,
) -> torch.Tensor:
    """``best_NK``, with ``~expert`` where an expert has ``capacity`` better tokens of the same sequence.

    Equal tokens that see equal tokens, such as the first ones of documents, have equal scores but for rounding, which
    depends on the layout. So scores are rounded to half their bits before they are compared, and ties go by position.

    Args:
        seq_length: of whole sequences.
        by_position: whether a full expert takes the first tokens, and not those with the highest scores.
        context: the ranks whose tokens are to be judged together; ``None``: this one has whole sequences.
    """
    half = torch.float32 if judged_NE.dtype == torch.float64 else torch.bfloat16
    scores_NK, num_experts = judged_NE.gather(1, best_NK).to(half), judged_NE.shape[1]
    if context is not None:
        best_NK, scores_NK = context.whole(best_NK, seq_length), context.whole(scores_NK, seq_length)
    experts_BM = best_NK.view(-1, seq_length * best_NK.shape[1])
    places_BM = torch.arange(experts_BM.shape[1], device=best_NK.device).expand_as(experts_BM)
    order_BM = places_BM
    if not by_position:
        order_BM = scores_NK.view_as(experts_BM).argsort(dim=1, descending=True, stable=True)
    order_BM = order_BM.gather(
        1, experts_BM.gather(1, order_BM).argsort(dim=1, stable=True)
    )  # by expert, the best first
    counts_BE = counts_of(experts_BM[..., None], num_experts)
    starts_BM = (counts_BE.cumsum(1) - counts_BE).gather(1, experts_BM.gather(1, order_BM))
    is_surplus_BM = torch.empty_like(experts_BM, dtype=torch.bool).scatter_(
        1, order_BM, places_BM - starts_BM >= capacity
    )
    taken_NK = torch.where(is_surplus_BM, ~experts_BM, experts_BM).view_as(best_NK)
    return taken_NK if context is None else context.own(taken_NK, seq_length)


class ContextRanks(Protocol):
    """The ranks that divide the tokens of samples; :mod:`gptpar.context_parallel` has them."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def summed(self, counts: torch.Tensor) -> torch.Tensor:
        """Over the ranks."""

    def whole(self, x_ND: torch.Tensor, seq_length: int) -> torch.Tensor:
        """Of the tokens of whole samples, where each rank has some."""

    def own(self, x_ND: torch.Tensor, seq_length: int) -> torch.Tensor:
        """Of this rank's tokens; the inverse of :meth:`whole`."""


class Routed(NamedTuple):
    """Where tokens go.

    Attributes:
        chosen_NK: int64, experts, the best first; E in place of an expert that is full.
        weights_NK: of their outputs, in fp32 or wider.
        losses: scalars that training adds to the loss.
    """

    chosen_NK: torch.Tensor
    weights_NK: torch.Tensor
    losses: dict[str, torch.Tensor]


def losses_of(config: ModelConfig) -> tuple[str, ...]:
    """The names of the losses that a layer with experts returns."""
    return (BALANCE_LOSS,) * config.balances + (Z_LOSS,) * (config.moe_z_loss_coeff > 0)


class _Logits(torch.autograd.Function):
    """``x W^T`` in fp32 or wider. The operands are kept for the backward pass as they are, in a narrower format.

    In bf16 on a GPU, tensor cores multiply. Each product of two numbers is exact in fp32; the sums are in fp32, and are
    truncated instead of rounded. A gradient in fp32 is split into three numbers in bf16, which together have its 24
    bits (but for numbers below 2^-109).
    """

    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        if _has_exact_products(x_ND, weight_ED):
            return torch.mm(x_ND, weight_ED.t(), out_dtype=wide)
        return x_ND.to(wide) @ weight_ED.to(wide).t()

    @staticmethod
    def backward(ctx: Any, grad_NE: torch.Tensor) -> Any:  # type: ignore[override]
        x_ND, weight_ED = ctx.saved_tensors
        if _has_exact_products(x_ND, weight_ED):
            parts_NP = torch.cat(in_parts(grad_NE, torch.bfloat16, 3), 1)
            of_x = torch.mm(parts_NP, weight_ED.repeat(3, 1))
            of_weight = torch.mm(parts_NP.t(), x_ND, out_dtype=grad_NE.dtype).unflatten(0, (3, -1)).sum(0)
        else:
            of_x, of_weight = grad_NE @ weight_ED.to(grad_NE.dtype), grad_NE.t() @ x_ND.to(grad_NE.dtype)
        return of_x.to(x_ND.dtype), of_weight.to(weight_ED.dtype)


def _has_exact_products(x_ND: torch.Tensor, weight_ED: torch.Tensor) -> bool:
    return x_ND.is_cuda and x_ND.dtype == weight_ED.dtype == torch.bfloat16


class Router(nn.Module):
    """Scores experts for each token, and chooses the best.

    Tensor ranks all route all tokens. An expert's width is split over them, so that each has an addend of the gradient.
    In a model with biases, the router has one, too.

    Attributes:
        bias_E: is added to scores for the choice; ``None``: nothing is. It and ``last_E`` belong to
            :class:`~gptpar.model.experts.balance.ExpertBalance`.
        last_E: choices of each expert in the step before, for the loss over the whole step.
        context: the ranks that have other tokens of the same sequences; ``None``: this one has whole sequences.
    """

    bias_E: torch.Tensor | None = None
    last_E: torch.Tensor | None = None
    context: ContextRanks | None = None

    def __init__(self, config: ModelConfig, axis: TensorAxis):
        super().__init__()
        self.config, self.num_experts, self.topk = config, config.num_experts, config.moe_router_topk
        self.declared = {"weight": ParameterSpec(Normal(router_std(config)), axis.inside_layers)}
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.declared["bias"] = ParameterSpec(Constant(0.0), axis.inside_layers)
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.add_bias_linear else None
        # Under sequence parallelism an auxiliary loss counts for a part of the tokens on each rank already.
        self._loss_parts = 1 if axis.splits_tokens else axis.size

    def forward(self, x_ND: torch.Tensor, seq_length: int, choice_NK: torch.Tensor | None) -> Routed:
        """Route all tokens of a micro-batch.

        Args:
            seq_length: number of tokens of a sequence.
            choice_NK: keeps the choice; see :func:`choose_experts`. ``None``: it is not kept.
        """
        config = self.config
        logits_NE = _Logits.apply(x_ND, self.weight)
        if self.bias is not None:
            logits_NE = logits_NE + self.bias.to(logits_NE.dtype)
        scores_NE = logits_NE.softmax(-1) if config.moe_router_score_function == "softmax" else logits_NE.sigmoid()
        found_NK = chosen_NK = self._choose(scores_NE.detach(), seq_length, choice_NK)
        if self.drops_tokens:
            chosen_NK = torch.where(found_NK < 0, ~found_NK, found_NK)
        weights_NK = scores_NE.gather(1, chosen_NK)
        if self._is_divided:
            # A sigmoid of all chosen experts may be 0.
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True).clamp(min=1e-20)
        if config.moe_router_topk_scaling_factor != 1:
            weights_NK = weights_NK * config.moe_router_topk_scaling_factor
        losses = self._losses(logits_NE, chosen_NK, seq_length)
        if self.drops_tokens:
            weights_NK = weights_NK.masked_fill(found_NK < 0, 0)
            chosen_NK = torch.where(found_NK < 0, self.num_experts, chosen_NK)
        return Routed(chosen_NK, weights_NK, losses)

    def _choose(self, scores_NE: torch.Tensor, seq_length: int, choice_NK: torch.Tensor | None) -> torch.Tensor:
        judged_NE, config = scores_NE if self.bias_E is None else scores_NE + self.bias_E, self.config
        groups = [count for count in (config.moe_router_num_groups, config.moe_router_group_topk) if count]
        if choice_NK is None:
            return best_experts(judged_NE, self.topk, groups)
        length = seq_length * (1 if self.context is None else self.context.size)
        limit = length, config.capacity(length), config.moe_token_drop_policy == "position"
        if self.context is not None and self.drops_tokens:
            return _chosen_with_others(judged_NE, choice_NK, groups, *limit, self.context)
        return choose_experts(judged_NE, choice_NK, groups, *limit)

    @property
    def drops_tokens(self) -> bool:
        """Whether a full expert takes no further tokens in training."""
        return self.config.moe_expert_capacity_factor is not None

    @property
    def _is_divided(self) -> bool:
        """Whether weights are divided by their sum; that of one expert would be 1, and teach the router nothing."""
        return self.topk > 1 and not self.config.moe_router_pre_softmax

    def kept(self, batch: BatchShape) -> float:
        """Bytes that the backward pass needs of a token: weights, probabilities, and those that losses have."""
        names, weights = losses_of(self.config), self.topk
        if self._is_divided:
            weights += self.topk + 2
        of_losses = self.num_experts * len(names) + (Z_LOSS in names)
        return (self.num_experts + weights + of_losses) * batch.statistic_size

    def _losses(self, logits_NE: torch.Tensor, chosen_NK: torch.Tensor, seq_length: int) -> dict[str, torch.Tensor]:
        """Each rank of the tensor axis has the whole loss and an addend of its gradient."""
        config, names = self.config, losses_of(self.config)
        if not self.training:
            return {name: logits_NE.new_zeros(()) for name in names}
        if self._loss_parts > 1:
            fixed_NE = logits_NE.detach()
            logits_NE = fixed_NE + (logits_NE - fixed_NE) / self._loss_parts
        found: dict[str, torch.Tensor] = {}
        if BALANCE_LOSS in names:
            found[BALANCE_LOSS] = config.moe_aux_loss_coeff * self._imbalance(logits_NE, chosen_NK, seq_length)
        if Z_LOSS in names:
            found[Z_LOSS] = config.moe_z_loss_coeff * logits_NE.logsumexp(-1).square().mean()
        return found

    def _imbalance(self, logits_NE: torch.Tensor, chosen_NK: torch.Tensor, seq_length: int) -> torch.Tensor:
        """Sum over experts of (share of the choices x number of experts x mean probability); 1 where they are even."""
        if self.config.moe_router_score_function == "softmax":
            probabilities_NE = logits_NE.softmax(-1)
        else:
            probabilities_NE = logits_NE.sigmoid()
            probabilities_NE = probabilities_NE / probabilities_NE.sum(-1, keepdim=True)
        kind = self.config.moe_router_load_balancing_type
        if kind != OF_STEP:
            length = seq_length if kind == OF_SEQUENCE else len(chosen_NK)
            counts_BE = counts_of(chosen_NK.unflatten(0, (-1, length)), self.num_experts)
            if self.context is not None:
                # Ranks' losses have one mean, so that each adds the probabilities of its own tokens.
                counts_BE = self.context.summed(counts_BE)
            mean_BE = probabilities_NE.unflatten(0, (-1, length)).mean(1)
        else:
            zeros = torch.zeros((), dtype=torch.int64, device=logits_NE.device).expand(self.num_experts)
            counts_BE, mean_BE = (zeros if self.last_E is None else self.last_E)[None], probabilities_NE.mean(0)[None]
        shares_BE = counts_BE.to(mean_BE.dtype) / counts_BE.sum(-1, keepdim=True).clamp(min=1)
        return self.num_experts * (shares_BE * mean_BE).sum(-1).mean()


def counts_of(chosen_BNK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int64 [B, E]: how often each sequence chose each expert; sums of integers depend on no order."""
    flat_BM = chosen_BNK.flatten(1).long()
    zeros_BE = torch.zeros(flat_BM.shape[0], num_experts, dtype=torch.int64, device=flat_BM.device)
    return zeros_BE.scatter_add_(1, flat_BM, torch.ones_like(flat_BM))
