"""Flags of a mixture of experts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gptpar.config.fields import flag

MAX_LISTED = 100_000
"""Blocks that a list may have."""
LOAD = "fullest expert"
"""A number of each step: tokens of the fullest expert over those of an expert on average, as a mean over layers."""
OF_SEQUENCE, OF_STEP, OF_MICRO_BATCH = "seq_aux_loss", "global_aux_loss", "aux_loss"


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Options of blocks whose MLP is a mixture of experts."""

    num_experts: int = flag(1, "experts of a block; 1: every block has an MLP", least=1, most=32_767)
    moe_router_topk: int = flag(2, "experts of each token", least=1, most=32_767)
    moe_ffn_hidden_size: int | None = flag(
        None, "width of each expert (default: --ffn-hidden-size)", least=1, most=10_000_000
    )
    moe_layer_freq: str = flag(
        "1",
        "blocks with experts: N for every Nth block, the first one included, or a list such as [0]*1+[1]*15, where 0 "
        "is a block with an MLP",
        metavar="N",
    )
    moe_router_score_function: str = flag(
        "softmax", "from the router's logits to scores", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(
        False, "weigh the chosen experts by their softmax over all experts, not over the chosen ones"
    )
    moe_router_num_groups: int | None = flag(
        None, "groups into which neighbouring experts are divided, to limit a token's choice", least=1, most=32_767
    )
    moe_router_group_topk: int | None = flag(
        None, "groups whose experts a token may choose: those whose best experts have the largest sums", least=1
    )
    moe_router_topk_scaling_factor: float = flag(1.0, "factor of the experts' weights", above=0)
    moe_router_enable_expert_bias: bool = flag(
        False, "balance by a bias that enters the choice of experts alone; each step raises it where tokens are few"
    )
    moe_router_bias_update_rate: float = flag(1e-3, "by how much a step changes the expert bias", least=0)
    moe_router_load_balancing_type: str = flag(
        "none",
        "loss that balances experts: over each sequence, with the choices of the whole step before, or over each "
        "micro-batch (aux_loss), so that it depends on --micro-batch-size",
        choices=("none", OF_SEQUENCE, OF_STEP, OF_MICRO_BATCH),
    )
    moe_aux_loss_coeff: float = flag(0.0, "factor of that loss", least=0)
    moe_z_loss_coeff: float = flag(0.0, "factor of the mean of logsumexp(router logits)^2", least=0)
    moe_expert_capacity_factor: float | None = flag(
        None,
        "in training, limit an expert's tokens of each sequence to this times their mean (default: no limit)",
        above=0,
    )
    moe_token_drop_policy: str = flag(
        "probs",
        "tokens that a full expert takes: those with the highest scores, or the first ones",
        choices=("probs", "position"),
    )
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "width of an MLP that takes every token beside its experts", least=1, most=10_000_000
    )
    moe_shared_expert_gate: bool = flag(False, "multiply that MLP's output by the sigmoid of a learned gate")

    @property
    def has_experts(self) -> bool:
        """Whether some blocks are mixtures."""
        return self.num_experts > 1

    def width_of_experts(self, ffn_hidden_size: int) -> int:
        """The width of each expert, by default that of the model's other MLPs."""
        return self.moe_ffn_hidden_size or ffn_hidden_size

    @property
    def balances(self) -> bool:
        """Whether there is a loss that balances experts."""
        return self.moe_router_load_balancing_type != "none" and self.moe_aux_loss_coeff > 0

    @property
    def balances_micro_batches(self) -> bool:
        """Whether that loss is over each micro-batch, so that it depends on the micro-batch's size."""
        return self.balances and self.moe_router_load_balancing_type == OF_MICRO_BATCH

    def capacity(self, seq_length: int) -> int:
        """The most tokens of a sequence that an expert takes in training; 0: there is no limit."""
        if self.moe_expert_capacity_factor is None:
            return 0
        return math.ceil(seq_length * self.moe_router_topk * self.moe_expert_capacity_factor / self.num_experts)

    @property
    def uses_last_choices(self) -> bool:
        """Whether that loss needs the choices of the step before."""
        return self.balances and self.moe_router_load_balancing_type == OF_STEP

    def blocks_with_experts(self, num_layers: int) -> Sequence[bool]:
        """For each block, whether it is a mixture; blocks beyond a list's end are not.

        Raises:
            ValueError: ``moe_layer_freq`` is neither a number nor a list.
        """
        if not self.has_experts:
            return [False] * num_layers
        text = re.sub(r"[\s()]", "", self.moe_layer_freq)
        if re.fullmatch(r"[1-9]\d{0,4}", text):
            return [number % int(text) == 0 for number in range(num_layers)]
        found: list[bool] = []
        for term in text.split("+"):
            match = re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,5}))?", term)
            if match is None:
                raise ValueError(f"{term[:40]!r} is neither a number nor a list of 0 and 1 such as [0,1]*8")
            found += [one == "1" for one in match[1].split(",")] * int(match[2] or 1)
            if len(found) > MAX_LISTED:
                raise ValueError(f"it lists more than {MAX_LISTED:,} blocks")
        return [*found, *[False] * (num_layers - len(found))] if len(found) < num_layers else found
