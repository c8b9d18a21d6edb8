"""A mixture of experts against a plain loop, losses against their formulas, balance from step to step."""

import copy
import json
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gptpar.config import ModelConfig
from gptpar.errors import CheckpointError
from gptpar.model.activations import FUNCTIONS, gated
from gptpar.model.block import make_experts
from gptpar.model.experts import products
from gptpar.model.experts.balance import ExpertBalance, choice_field
from gptpar.model.experts.dispatch import ALL_EXPERTS, ExpertAxis, _to_all
from gptpar.model.experts.layer import Experts
from gptpar.model.experts.products import added, combined, places_of
from gptpar.model.experts.routing import (
    BALANCE_LOSS,
    Z_LOSS,
    best_experts,
    choose_experts,
    no_choice,
)
from gptpar.model.gpt import gpt_model
from gptpar.model.linear import Linears
from tests.helpers import tiny_config

LENGTH, SAMPLES = 16, 2
TOKENS = LENGTH * SAMPLES
SEQUENCE = "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.3 "
STEP = "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.3 "
GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2"
CAPACITY = "--moe-expert-capacity-factor 0.75 "
BIAS = "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.25 "


def config_of(flags: str) -> ModelConfig:
    more = "" if "--num-experts" in flags else "--num-experts 5 "
    more += "" if "--quick-geglu" in flags else "--disable-bias-linear "
    return tiny_config(f"{more}--seq-length {LENGTH} " + flags).model


def made(flags: str) -> Experts:
    torch.manual_seed(1)
    layer = make_experts(Linears(config_of(flags)), ALL_EXPERTS).double()
    for parameter in layer.parameters():
        parameter.data.normal_(std=0.3)
    return layer


def tokens_of(layer: Experts, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    width = layer.down.shape[1]
    return torch.randn(TOKENS, width, dtype=torch.float64, generator=generator).requires_grad_()


def by_a_loop(layer: Experts, x_ND: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    judged, choices = zip(*(choice(layer, x_D) for x_D in x_ND), strict=True)
    if layer.router.config.moe_expert_capacity_factor:
        drop_surplus(layer.router.config, judged, choices)
    outputs = []
    for x_D, weight_of in zip(x_ND, choices, strict=True):
        y_D = torch.zeros_like(x_D)
        for expert, weight in weight_of.items():
            y_D = y_D + weight * of_expert(layer, expert, x_D)
        if layer.shared is not None:
            shared_D = layer.shared(x_D[None])[0]
            y_D = y_D + (shared_D if layer.gate is None else shared_D * (layer.gate[0] @ x_D).sigmoid())
        outputs.append(y_D)
    return torch.stack(outputs)


def choice(layer: Experts, x_D: torch.Tensor) -> tuple[list[float], dict[int, torch.Tensor]]:
    """The scores by which a token's experts are chosen, and the weight of each chosen one."""
    config, router = layer.router.config, layer.router
    logits_E = router.weight @ x_D + (0 if router.bias is None else router.bias)
    softmax = config.moe_router_score_function == "softmax"
    scores_E = logits_E.softmax(0) if softmax else 1 / (1 + (-logits_E).exp())
    judged = (scores_E if router.bias_E is None else scores_E + router.bias_E).tolist()
    if config.moe_router_num_groups:
        judged = in_the_best_groups(judged, config.moe_router_num_groups, config.moe_router_group_topk or 0, layer.topk)
    chosen = sorted(range(len(judged)), key=lambda expert: (-judged[expert], expert))[: config.moe_router_topk]
    weights = scores_E[chosen] * config.moe_router_topk_scaling_factor
    divided = not config.moe_router_pre_softmax and config.moe_router_topk > 1
    weights = weights / scores_E[chosen].sum() if divided else weights
    return judged, dict(zip(chosen, weights, strict=True))


def drop_surplus(
    config: ModelConfig, judged: Sequence[list[float]], choices: Sequence[dict[int, torch.Tensor]]
) -> None:
    """Take the tokens beyond each expert's capacity away from it, in each sequence."""
    before = sum(map(len, choices))
    for first in range(0, TOKENS, LENGTH):
        for expert in range(len(judged[0])):
            takers = [n for n in range(first, first + LENGTH) if expert in choices[n]]
            if config.moe_token_drop_policy == "probs":
                takers.sort(key=lambda n: -judged[n][expert])
            capacity = config.capacity(LENGTH)
            assert capacity == 5  # 4.8 and 4.5 of the cases below, rounded up
            for n in takers[capacity:]:
                del choices[n][expert]
    assert sum(map(len, choices)) < before


def of_expert(layer: Experts, expert: int, x_D: torch.Tensor) -> torch.Tensor:
    config = layer.router.config
    parts = [matrix @ x_D for matrix in layer.up[expert]]
    if layer.up_bias is None or layer.down_bias is None:
        inner = gated("swiglu", torch.cat(parts, -1)) if config.swiglu else FUNCTIONS["gelu"][0](parts[0])
        return layer.down[expert] @ inner
    limit, (gates, values) = config.activation_func_clamp_value, (layer.up_bias[expert] + torch.stack(parts)).unbind()
    if limit is not None:
        gates, values = gates.clamp(max=limit), values.clamp(min=-limit, max=limit)
    inner = gates / (1 + (-1.702 * gates).exp()) * (values + config.glu_linear_offset)
    return layer.down[expert] @ inner + layer.down_bias[expert]


def in_the_best_groups(judged: list[float], num_groups: int, num_used: int, topk: int) -> list[float]:
    """Scores, with -inf outside of the groups whose best experts have the largest sums."""
    size = len(judged) // num_groups
    sums = [
        sum(sorted(judged[group * size : (group + 1) * size])[-(topk // num_used) :]) for group in range(num_groups)
    ]
    used = sorted(range(num_groups), key=lambda group: (-sums[group], group))[:num_used]
    return [score if expert // size in used else -float("inf") for expert, score in enumerate(judged)]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--num-experts 12 --moe-router-topk 4 --moe-router-score-function sigmoid " + GROUPS,
        "--num-experts 8 --moe-router-topk 2 --moe-router-pre-softmax --swiglu " + GROUPS,
        "--num-experts 7 --moe-router-topk 3 --moe-router-pre-softmax --swiglu",
        "--moe-router-topk 1 --moe-router-score-function sigmoid",
        "--moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --swiglu",
        "--moe-shared-expert-intermediate-size 6 --moe-shared-expert-gate",
        "--quick-geglu --activation-func-clamp-value 0.7 --glu-linear-offset 1 --moe-router-topk 3",
        CAPACITY + "--moe-token-drop-policy probs",
        CAPACITY + "--moe-token-drop-policy position --num-experts 8 --moe-router-topk 3 --swiglu " + SEQUENCE,
    ],
)
@pytest.mark.parametrize("loads", ["as they come", "one empty, one full"])
def test_a_mixture_equals_a_loop(flags: str, loads: str) -> None:
    """Outputs, and the gradients of tokens and of every parameter; the losses are those of all choices."""
    layer = made(flags)
    if loads != "as they come":
        layer.router.bias_E = torch.zeros(layer.num_experts, dtype=torch.float64)
        layer.router.bias_E[-1], layer.router.bias_E[0] = 10, -10
    x_ND = tokens_of(layer)
    found_ND, losses = layer(x_ND, LENGTH, no_choice(TOKENS, layer.topk, x_ND.device))
    wanted_ND = by_a_loop(layer, x_ND)
    assert losses == layer.router(x_ND, LENGTH, None).losses and bool(losses) == ("aux_loss" in flags)
    assert torch.allclose(found_ND, wanted_ND, rtol=1e-12, atol=1e-13)
    leaves = [x_ND, *layer.parameters()]
    weight_ND = torch.randn_like(found_ND)
    found = torch.autograd.grad((found_ND * weight_ND).sum(), leaves)
    wanted = torch.autograd.grad((wanted_ND * weight_ND).sum(), leaves, materialize_grads=True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)


def scattered_copies(
    x_ND: torch.Tensor, rows_NK: torch.Tensor, taken_NK: torch.Tensor | None, num_rows: int
) -> torch.Tensor:
    """As the GPU's kernel, which writes the rows of taken copies alone; others hold NaN here."""
    tokens, copies = (torch.ones_like(rows_NK) if taken_NK is None else taken_NK).nonzero(as_tuple=True)
    return x_ND.new_full((num_rows, x_ND.shape[1]), torch.nan).index_copy(0, rows_NK[tokens, copies], x_ND[tokens])


def weighted_copies_backward(
    grad_ND: torch.Tensor,
    y_MD: torch.Tensor,
    weights_NK: torch.Tensor,
    rows_NK: torch.Tensor,
    taken_NK: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the GPU's kernel; see above."""
    tokens, copies = (torch.ones_like(rows_NK) if taken_NK is None else taken_NK).nonzero(as_tuple=True)
    rows, grads = rows_NK[tokens, copies], grad_ND[tokens]
    of_y_MD, of_weights_NK = torch.full_like(y_MD, torch.nan), torch.zeros_like(weights_NK)
    of_y_MD[rows] = grads * weights_NK[tokens, copies, None]
    of_weights_NK[tokens, copies] = (grads * y_MD[rows]).sum(-1)
    return of_y_MD, of_weights_NK


@pytest.mark.parametrize("flags", ["--swiglu", CAPACITY, "--quick-geglu --moe-router-topk 3"])
def test_rows_that_no_copy_takes_are_read_by_nobody(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = made(flags)
    x_ND = tokens_of(layer)
    results = []
    for kernels in (None, SimpleNamespace(**{f.__name__: f for f in (scattered_copies, weighted_copies_backward)})):
        monkeypatch.setattr(products, "_moves_rows", lambda x, there=kernels is not None: there)
        monkeypatch.setattr(products.gpu, "copies", kernels)
        y_ND, _ = layer(x_ND, LENGTH, no_choice(TOKENS, layer.topk, x_ND.device))
        results.append([y_ND, *torch.autograd.grad(y_ND.sin().sum(), [x_ND, *layer.parameters()])])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)


def test_of_equal_scores_the_first_expert_and_the_first_group_are_chosen() -> None:
    judged_NE = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 3.0, 2.0]])
    assert choose_experts(judged_NE, no_choice(3, 2, judged_NE.device), []).tolist() == [[1, 2], [0, 1], [0, 2]]
    # Groups are judged by the sum of as many experts as a token takes of each: here by their best one.
    judged_NE = torch.tensor([[1.0, 0, 1, 0, 1, 0], [0, 3, 2, 2, 0, 1], [-5, -9, -6, -6, -8, -9]])
    assert best_experts(judged_NE, 2, [3, 2]).tolist() == [[0, 2], [1, 2], [0, 2]]
    assert best_experts(judged_NE, 2, [3, 1]).tolist() == [[0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(("policy", "kept"), [("probs", [1, 3]), ("position", [0, 1])])
def test_a_full_expert_takes_the_best_or_the_first_tokens_of_each_sequence(policy: str, kept: list[int]) -> None:
    """Two of the four tokens of a sequence, whatever other sequences choose; an expert that is full has no gradient."""
    scores_NE = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.8, 0.2]]).repeat(2, 1)
    choice_NK = no_choice(8, 1, torch.device("cpu"))
    found = choose_experts(scores_NE, choice_NK, [], 4, 2, policy == "position")
    assert found.flatten().tolist() == 2 * [0 if token in kept else ~0 for token in range(4)]
    assert torch.equal(choose_experts(1 - scores_NE, choice_NK, [], 4, 2, policy == "position"), found)


def test_tokens_whose_scores_differ_by_rounding_are_taken_in_their_order() -> None:
    scores_NE = torch.tensor([[0.6], [0.7 - 2e-16], [0.7], [0.7 + 2e-16]], dtype=torch.float64)
    found = choose_experts(scores_NE, no_choice(4, 1, scores_NE.device), [], 4, 2)
    assert found.flatten().tolist() == [~0, 0, 0, ~0]


def test_rows_of_no_expert_may_hold_any_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grouped kernel leaves them as memory was, which torch fills with NaN here; outputs are those of fp64."""
    monkeypatch.setattr(products, "_has_kernel", lambda x, *_: x.dtype == torch.bfloat16)  # the CPU's
    wide = made("--num-experts 4 --moe-expert-capacity-factor 0.5 --moe-ffn-hidden-size 16 --swiglu")
    for parameter in wide.parameters():
        parameter.data.copy_(parameter.data.bfloat16())
    x_ND, choice_NK, found = tokens_of(wide).detach().bfloat16(), no_choice(TOKENS, 2, torch.device("cpu")), []
    torch.use_deterministic_algorithms(True)
    try:
        for layer in (wide, copy.deepcopy(wide).bfloat16()):
            leaves = [x_ND.to(layer.up.dtype).requires_grad_(), *layer.parameters()]
            y_ND, _ = layer(leaves[0], LENGTH, choice_NK)
            found.append([y_ND.detach(), *torch.autograd.grad(y_ND, leaves, x_ND.to(y_ND.dtype))])
    finally:
        torch.use_deterministic_algorithms(False)
    assert (choice_NK < 0).any()
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.03 * one.norm()


def test_gradients_of_tokens_that_go_to_all_ranks_are_rounded_once() -> None:
    size = 4
    x_ND = torch.randn(64, 8, dtype=torch.bfloat16, requires_grad=True)
    grads = torch.randn(size, 64, 8).bfloat16()
    (found,) = torch.autograd.grad(_to_all(x_ND, ExpertAxis(size)), x_ND, [grads[0], grads[1:].flatten(0, 1)])
    assert torch.equal(found, grads.float().sum(0).bfloat16())


def test_a_copy_of_no_expert_adds_nothing_whatever_its_row_holds() -> None:
    places = places_of(torch.tensor([[0, 2], [1, 0]]), 2, has_none=True)
    y_MD, weights_NK = torch.tensor([[1.0], [2.0], [3.0], [torch.nan]]), torch.ones(2, 2, requires_grad=True)
    for here in (places, places.first(4)):
        found_ND = combined(y_MD, weights_NK, here)
        assert found_ND.tolist() == [[1.0], [5.0]]
        assert added(y_MD, here, torch.tensor([[10.0], [20.0]])).tolist() == [[11.0], [25.0]]
        assert torch.autograd.grad(found_ND.sum(), weights_NK)[0].tolist() == [[1.0, 0.0], [3.0, 2.0]]


def test_a_layer_that_is_computed_again_takes_the_same_experts() -> None:
    layer = made(SEQUENCE + "--swiglu")
    x_ND, choice_NK = tokens_of(layer), no_choice(TOKENS, 2, torch.device("cpu"))
    y_ND, losses = checkpoint(lambda x: layer(x, LENGTH, choice_NK), x_ND, use_reentrant=False)
    layer.router.bias_E = 10 * torch.arange(5.0, dtype=torch.float64)  # it would choose others now
    (y_ND.sum() + sum(losses.values())).backward()
    again = x_ND.grad
    assert again is not None
    layer.router.bias_E, x_ND.grad = None, None
    y_ND, losses = layer(x_ND, LENGTH, None)
    (y_ND.sum() + sum(losses.values())).backward()
    assert x_ND.grad is not None and torch.equal(again, x_ND.grad)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("kind", ["seq_aux_loss", "aux_loss", "global_aux_loss"])
def test_losses_are_those_of_their_formulas(kind: str, score: str) -> None:
    """Over each sequence, over a micro-batch, and over the step, which uses the choices of the step before."""
    balance = f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff 0.3 --moe-z-loss-coeff 0.2"
    layer = made(f"{balance} --moe-router-score-function {score}")
    layer.router.bias_E = torch.tensor([0.9, -0.9, 0, 0, 0])  # the loss is of the experts that are used
    x_ND, last_E = tokens_of(layer), torch.tensor([10, 0, 2, 4, 4])
    if kind == "global_aux_loss":
        assert balance_loss(layer, x_ND) == 0  # there is no step before the first
        layer.router.last_E = last_E
    routed = layer.router(x_ND, LENGTH, None)
    logits_NE = x_ND @ layer.router.weight.t()
    scores_NE = logits_NE.softmax(-1) if score == "softmax" else logits_NE.sigmoid()
    probabilities_NE = scores_NE / scores_NE.sum(-1, keepdim=True)
    wanted = []
    length = LENGTH if kind == "seq_aux_loss" else TOKENS
    for chosen_nK, probabilities_nE in zip(routed.chosen_NK.split(length), probabilities_NE.split(length), strict=True):
        counts_E = last_E if kind == "global_aux_loss" else torch.bincount(chosen_nK.flatten(), minlength=5)
        wanted.append(5 * (counts_E / counts_E.sum().double() * probabilities_nE.mean(0)).sum().item())
    found, halves = balance_loss(layer, x_ND), [balance_loss(layer, half) for half in x_ND.chunk(2)]
    assert found == pytest.approx(0.3 * sum(wanted) / len(wanted), rel=1e-12)
    if kind == "aux_loss":
        assert abs(found - sum(halves) / 2) > 1e-4, "it depends on the micro-batch's size"
    else:
        assert found == pytest.approx(sum(halves) / 2, rel=1e-12)
    z = logits_NE.exp().sum(-1).log().square().mean()
    assert routed.losses[Z_LOSS].item() == pytest.approx(0.2 * z.item(), rel=1e-12)
    assert layer.eval().router(x_ND, LENGTH, None).losses == {BALANCE_LOSS: 0, Z_LOSS: 0}


def balance_loss(layer: Experts, x_ND: torch.Tensor) -> float:
    return torch.as_tensor(layer.router(x_ND, LENGTH, None).losses[BALANCE_LOSS]).item()


def balance_of(flags: str) -> ExpertBalance:
    config = config_of(flags)
    return ExpertBalance(config, gpt_model(config).specs, torch.float32, torch.device("cpu"))


def test_which_blocks_have_experts() -> None:
    assert balance_of("--num-layers 5 --moe-layer-freq 2").names == ["layers.0", "layers.2", "layers.4"]
    assert balance_of("--num-layers 5 --moe-layer-freq ([0]*1+[1,0]*2)").names == ["layers.1", "layers.3"]
    assert balance_of("--num-layers 2 --num-experts 1").names == []


def counted(balance: ExpertBalance, counts: list[list[int]]) -> list[torch.Tensor]:
    """Count a step of two micro-batches on one process. In the second, the chosen experts were full."""
    balance.attach(dict.fromkeys(balance.names, nn.Module()))
    experts = torch.arange(len(counts[0]), dtype=torch.int16)
    chosen = [experts.repeat_interleave(torch.tensor(values))[:, None] for values in counts]
    batches = [
        {choice_field(name): of_batch(one) for name, one in zip(balance.names, chosen, strict=True)}
        for of_batch in (lambda one: one[::2], lambda one: ~one[1::2])
    ]
    balance.note_choices(batches)
    return balance.count(lambda tensor: tensor, counts=True)


def test_the_bias_moves_towards_even_loads_unless_the_step_was_skipped() -> None:
    balance = balance_of("--num-layers 2 " + BIAS + STEP)
    (load,) = counted(balance, [[8, 2, 4, 3, 3], [20, 0, 0, 0, 0]])
    assert load.item() == pytest.approx((8 / 4 + 20 / 4) / 2)
    balance.advance(torch.tensor(1.0))
    assert balance.tensors()["expert bias"].abs().sum() == 0
    balance.advance(torch.tensor(0.0))
    assert balance.tensors()["expert bias"].tolist() == [[-0.25, 0.25, 0, 0.25, 0.25], [-0.25, *[0.25] * 4]]
    assert balance.tensors()["choices of experts"].tolist() == [[8, 2, 4, 3, 3], [20, 0, 0, 0, 0]]
    assert balance.numbers == ("fullest expert",)


def test_the_bias_moves_by_counts_that_differ_by_one() -> None:
    balance = balance_of("--num-layers 1 " + BIAS)
    counted(balance, [[10001, 9999, 10000, 10000, 10000]])
    balance.advance(torch.tensor(0.0))
    assert balance.tensors()["expert bias"].tolist() == [[-0.25, 0.25, 0, 0, 0]]


def test_the_state_goes_through_json_and_fits_its_model_alone() -> None:
    flags = "--num-layers 2 " + BIAS + STEP
    balance, other = balance_of(flags), balance_of(flags)
    counted(balance, [[8, 2, 4, 3, 3], [20, 0, 0, 0, 0]])
    balance.advance(torch.tensor(0.0))
    other.load(json.loads(json.dumps(balance.state())))
    assert other.state() == balance.state() and other.tensors()["expert bias"].dtype == torch.float32
    layer = made(flags)
    other.attach({"layers.1": layer})
    assert layer.router.bias_E is not None and layer.router.bias_E.tolist() == [-0.25, *[0.25] * 4]
    assert layer.router.last_E is not None and layer.router.last_E.tolist() == [20, 0, 0, 0, 0]
    fewer = balance_of("--num-layers 2 --moe-layer-freq [0,1] " + BIAS + STEP)
    fewer.load(balance.state())  # of a model that is fine-tuned
    assert fewer.tensors()["choices of experts"].tolist() == [[20, 0, 0, 0, 0]]
    with pytest.raises(CheckpointError, match=r"not that of 2 layers with 5 experts \(layers.0"):
        other.load(fewer.state())
    with pytest.raises(CheckpointError, match="not that of 2 layers with 5 experts"):
        other.load({"layers": ["layers.0", "layers.1"], "bias": [[0.0]], "choices": [[0]]})
    with pytest.raises(CheckpointError, match="does not name its layers, because an older gptpar saved it: go on with"):
        other.load({"bias": [[0.0] * 5] * 2, "choices": [[0] * 5] * 2})
    assert balance_of("--num-experts 1").state() is None
