"""Checks a mixture of experts: which blocks have one, what is chosen, what is balanced, what is not there yet."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Flags, ModelFlags
from gptpar.config.fields import flag_name
from gptpar.config.sections.experts import OF_MICRO_BATCH, OF_SEQUENCE, OF_STEP, ExpertOptions

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
    if m.mup and flags.optimizer.optimizer == "muon":
        yield (
            f"--mup has no rule for Muon's update of a router, whose {m.num_experts} outputs do not grow with the "
            "model: leave one out, or train a model with --num-experts 1."
        )
    yield from _not_together(flags)
    yield from _tensor(flags)


def _not_together(flags: Flags) -> Iterator[str]:
    """What experts do not go with yet."""
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
    if len(found) > m.num_layers or ("[" in m.moe_layer_freq and len(found) != m.num_layers):
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
