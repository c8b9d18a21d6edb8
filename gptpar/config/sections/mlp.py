"""Flags of a block's MLP: its activation and gate; of the experts that take its place; and whether they agree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptpar.config.fields import Derived, Notes, flag, flag_name
from gptpar.config.layer_patterns import layer_digits

if TYPE_CHECKING:
    from gptpar.config import Flags, ModelFlags

GATES = ("geglu", "geglu_tanh", "quick_geglu", "reglu", "liglu")
"""Activations that multiply one half of the first layer's output by a function of the other half; so does SwiGLU."""

FUSED_GELU, UNFUSED_GELU = "gelu_tanh", "gelu"
"""Megatron-LM's GELU: fused with a bias it is the tanh form, else the exact one."""

LOAD = "fullest expert"
"""A number of each step: tokens of the fullest expert over those of an expert on average, as a mean over layers."""
SENT_TO_ALL = 0.75
"""From this share of tokens on, all are sent to a process: before the router has chosen, and without a copy."""
OF_SEQUENCE, OF_STEP, OF_MICRO_BATCH = "seq_aux_loss", "global_aux_loss", "aux_loss"


@dataclass(frozen=True, kw_only=True)
class MLPOptions:
    """The activation function of an MLP, or its gate."""

    swiglu: bool = flag(False, "gated SiLU MLP instead of GELU")
    mlp_activation: str = flag(
        FUSED_GELU,
        "the MLP's activation function without --swiglu (without biases the default is gelu, as in Megatron-LM); "
        "geglu, geglu_tanh, quick_geglu, reglu and liglu are gates, as SwiGLU is: of the exact GELU, its tanh form, "
        "x * sigmoid(1.702 x), the ReLU, and none",
        choices=(FUSED_GELU, UNFUSED_GELU, "squared_relu", *GATES),
        spellings={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu2": "squared_relu"},
    )
    activation_func_clamp_value: float | None = flag(
        None,
        "c: in an MLP with a gate, clamp the gate's input to at most c, and the other half to -c ... c (gpt-oss: 7)",
        above=0,
    )
    glu_linear_offset: float = flag(
        0.0, "in an MLP with a gate, add this to the half that the gate multiplies (gpt-oss: 1)"
    )

    @property
    def gated(self) -> bool:
        """Whether one half of the MLP's first layer is multiplied by an activation of the other half."""
        return self.swiglu or self.mlp_activation in GATES


def choose_gelu(flags: Flags, given: Set[str]) -> tuple[Flags, list[Derived]]:
    """Set Megatron's GELU of an MLP that has no bias to fuse it with, or whose fusion is off.

    Args:
        given: fields that keep what was typed, as ``section.field``.
    """
    notes, model = Notes(flags), flags.model
    switches = model.swiglu, model.glu_activation, model.quick_geglu, model.squared_relu
    other = any(switches) or model.mlp_activation != FUSED_GELU
    if not other and "model.mlp_activation" not in given and not (model.add_bias_linear and model.bias_gelu_fusion):
        reason = "--disable-bias-linear" if not model.add_bias_linear else "--no-bias-gelu-fusion"
        notes.replace("model", "mlp_activation", UNFUSED_GELU, f"{reason}, as in Megatron-LM")
    return notes.flags, notes.derived


def derive_mlp(notes: Notes) -> None:
    """Derive the gate from other programs' words, and the width: with a gate two thirds, as Megatron has it."""
    model = notes.flags.model
    gate, reason = model.glu_activation, f"--glu-activation {model.glu_activation}"
    if gate is None and model.quick_geglu:
        gate, reason = "quick_geglu", "--quick-geglu"
    if gate is not None and not model.swiglu:
        name, value = ("swiglu", True) if gate == "swiglu" else ("mlp_activation", gate)
        notes.replace("model", name, value, reason)
        if model.hidden_size:
            width = 4 * model.hidden_size
            notes.fill("model", "ffn_hidden_size", width, f"4 x hidden, as {reason.split()[0]} has it")
    if model.squared_relu:
        notes.replace("model", "mlp_activation", "squared_relu", "--squared-relu")
    if model.hidden_size and notes.flags.model.gated:
        width = int(4 * model.hidden_size * 2 / 3 / 64) * 64
        notes.fill("model", "ffn_hidden_size", width, "8/3 x hidden for a gated MLP, a multiple of 64")
    elif model.hidden_size:
        notes.fill("model", "ffn_hidden_size", 4 * model.hidden_size, "4 x hidden")


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
        found = layer_digits(self.moe_layer_freq)
        if isinstance(found, int):
            return [number % found == 0 for number in range(num_layers)]
        return [*map(bool, found), *[False] * (num_layers - len(found))]


def share_of_tokens(size: int, topk: int) -> float:
    """How many of a process's tokens choose an expert of another one, of ``size`` with experts, if loads are even."""
    return 1 - (1 - 1 / size) ** topk


NEED_EXPERTS = tuple(name for name in ExpertOptions.__dataclass_fields__ if name != "num_experts")


def check_experts(flags: Flags) -> Iterator[str]:
    """The model's experts."""
    m = flags.model
    if not m.has_experts:
        defaults = ExpertOptions()
        given = [flag_name(name) for name in NEED_EXPERTS if getattr(m, name) != getattr(defaults, name)]
        if given:
            yield f"{', '.join(given)}: these are for experts, and --num-experts is 1: raise it, or leave them out."
        return
    yield from _blocks(m)
    yield from _router(m)
    yield from _groups(m)
    yield from _capacity(m)
    yield from _balance(m)
    if m.mup and flags.optimizer.optimizer == "muon" and m.num_experts > (m.mup_base_hidden_size or m.num_experts):
        yield (
            f"--mup has a rule for Muon's update of a router with at most --mup-base-hidden-size "
            f"{m.mup_base_hidden_size} experts, and --num-experts is {m.num_experts}: choose a wider base model."
        )
    yield from _not_together(flags)
    yield from _tensor(flags)


def _not_together(flags: Flags) -> Iterator[str]:
    """Problems of options that experts do not have."""
    again = flags.recompute
    if again.mlp_chunks_for_training > 1 or "mlp_act" in (again.recompute_modules or ()):
        yield (
            "--mlp-chunks-for-training and mlp_act of --recompute-modules are for MLPs, and not for experts yet: leave "
            "them out; --recompute-modules mlp is for both."
        )


def _blocks(m: ModelFlags) -> Iterator[str]:
    if m.num_layers is None:
        return
    try:
        found = m.blocks_with_experts(m.num_layers)
    except ValueError as error:
        yield f"--moe-layer-freq {m.moe_layer_freq[:80]}: {error}."
        return
    if len(found) > m.num_layers:
        yield f"--moe-layer-freq lists {len(found)} blocks, and --num-layers is {m.num_layers}: list as many."
    elif not any(found):
        yield f"--moe-layer-freq {m.moe_layer_freq[:80]} gives no block experts: list a 1, or drop --num-experts."


def _router(m: ModelFlags) -> Iterator[str]:
    if m.moe_router_topk > m.num_experts:
        yield f"--moe-router-topk {m.moe_router_topk} is more than --num-experts {m.num_experts}: lower it."
    softmax = m.moe_router_score_function == "softmax"
    if softmax and m.moe_router_topk == 1 and not m.moe_router_pre_softmax:
        yield (
            "--moe-router-topk 1 with a softmax over the chosen expert alone weighs it by 1, so that the router learns "
            "nothing: give --moe-router-pre-softmax, or choose 2 experts or more."
        )
    if not softmax and m.moe_router_pre_softmax:
        yield "--moe-router-pre-softmax is for --moe-router-score-function softmax: drop one of them."
    if m.moe_shared_expert_gate and m.moe_shared_expert_intermediate_size is None:
        yield "--moe-shared-expert-gate is a shared expert's: give --moe-shared-expert-intermediate-size, too."


def _groups(m: ModelFlags) -> Iterator[str]:
    """A token's experts must be equally many of each of its groups, and fit there."""
    groups, chosen, topk = m.moe_router_num_groups, m.moe_router_group_topk, m.moe_router_topk
    if groups is None and chosen is None:
        return
    named = f"--moe-router-num-groups {groups}, --moe-router-group-topk {chosen}"
    if groups is None or chosen is None:
        yield f"{named}: how many groups there are and how many a token may use go together: give both."
    elif m.num_experts % groups or chosen > groups:
        yield (
            f"{named}: the first must divide --num-experts {m.num_experts}, and the second cannot be larger: choose "
            "others."
        )
    elif not chosen <= topk <= chosen * (m.num_experts // groups) or topk % chosen:
        yield (
            f"{named}: the {topk} experts of --moe-router-topk are as many of each of {chosen} groups of "
            f"{m.num_experts // groups}: make it a multiple of {chosen}, at most {chosen * (m.num_experts // groups)}."
        )
    if m.moe_router_score_function == "softmax" and not m.moe_router_pre_softmax:
        yield (
            f"{named}: groups are compared by scores over all experts: give --moe-router-pre-softmax, or "
            "--moe-router-score-function sigmoid."
        )


def _capacity(m: ModelFlags) -> Iterator[str]:
    factor = m.moe_expert_capacity_factor
    if factor is None and m.moe_token_drop_policy != ExpertOptions().moe_token_drop_policy:
        yield "--moe-token-drop-policy is for full experts: give --moe-expert-capacity-factor, too."
    if factor is not None and m.moe_router_topk * factor >= m.num_experts:
        yield (
            f"--moe-expert-capacity-factor {factor:g} limits nothing: from --num-experts / --moe-router-topk = "
            f"{m.num_experts / m.moe_router_topk:g} on, an expert may take every token: leave it out, or lower it."
        )


def _balance(m: ModelFlags) -> Iterator[str]:
    kind, losses = m.moe_router_load_balancing_type, f"{OF_SEQUENCE}, {OF_STEP} or {OF_MICRO_BATCH}"
    usual = ExpertOptions().moe_router_bias_update_rate
    if m.moe_router_bias_update_rate != usual and not m.moe_router_enable_expert_bias:
        yield "--moe-router-bias-update-rate is the expert bias's: give --moe-router-enable-expert-bias, too."
    if kind == "none" and m.moe_aux_loss_coeff:
        yield (
            f"--moe-aux-loss-coeff {m.moe_aux_loss_coeff:g} is a factor of no loss: give "
            f"--moe-router-load-balancing-type {losses}, too."
        )
    if kind != "none" and not m.moe_aux_loss_coeff:
        yield (
            f"--moe-router-load-balancing-type {kind} with --moe-aux-loss-coeff 0 balances nothing: give a factor such "
            "as 0.01, or leave the type out."
        )


def _tensor(flags: Flags) -> Iterator[str]:
    """Tensor ranks split each expert's width."""
    m, size = flags.model, flags.parallel.tensor_model_parallel_size
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        width = getattr(m, name)
        if size > 0 and width and width % size:
            yield (
                f"{flag_name(name)} {width} is not divisible by --tensor-model-parallel-size {size}: "
                f"use {width - width % size or size} or {width - width % size + size}."
            )


def check_mlp(flags: Flags) -> Iterator[str]:
    """Gates that contradict each other, and options that only an MLP with a gate has."""
    m = flags.model
    yield from _options_of_gates(flags)
    if m.swiglu and m.mlp_activation != "gelu_tanh":
        yield f"--swiglu has an activation function of its own: drop --mlp-activation {m.mlp_activation}, or --swiglu."
    if m.swiglu and m.glu_activation not in (None, "swiglu"):
        yield f"--swiglu and --glu-activation {m.glu_activation} are different gates: keep one."
    if m.quick_geglu and (m.swiglu or m.glu_activation not in (None, "quick_geglu")):
        other = "--swiglu" if m.swiglu else f"--glu-activation {m.glu_activation}"
        yield f"--quick-geglu and {other} are different gates: keep one."


def _options_of_gates(flags: Flags) -> Iterator[str]:
    m = flags.model
    of_gates = [
        flag_name(name)
        for name in ("activation_func_clamp_value", "glu_linear_offset")
        if getattr(m, name) != getattr(MLPOptions(), name)
    ]
    if of_gates and not (m.gated or m.glu_activation or m.quick_geglu):
        yield f"{', '.join(of_gates)}: an MLP without a gate has neither: give --swiglu or --quick-geglu, or drop this."
