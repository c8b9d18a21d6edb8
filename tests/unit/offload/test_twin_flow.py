"""TwinFlowAdamW against torch.optim.AdamW: the same numbers for every ratio and way of calling it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gptpar import TwinFlowAdamW
from tests.pairs import every_pair
from tests.unit.offload.two_groups import Model, equal, inputs, scheduler, train, two_groups

RATIOS = [0.0, 0.3, 0.731, 1.0]


@pytest.mark.parametrize(
    ("ratio", "clip", "dtype", "rtol"),
    [
        *((ratio, 0.3, torch.float64, 1e-12) for ratio in RATIOS),
        *((ratio, 0.0, torch.float32, 2e-5) for ratio in (0.731,)),
    ],
)
def test_every_ratio_is_torchs_adamw(ratio: float, clip: float, dtype: torch.dtype, rtol: float, closing: Any) -> None:
    """Two groups, a schedule, accumulation, clipping, and a parameter that has no gradient in some steps."""
    plain, ours = Model(dtype), Model(dtype)
    reference = torch.optim.AdamW(two_groups(plain), lr=1e-2)
    optimizer = closing(TwinFlowAdamW(two_groups(ours), lr=1e-2, offload_ratio=ratio, max_norm=clip))
    train(plain, reference, range(12), scheduler(reference), clip)
    train(ours, optimizer, range(12), scheduler(optimizer))
    equal(ours, plain, rtol=rtol, atol=rtol)
    state, wanted = optimizer.state_dict()["state"], reference.state_dict()["state"]
    assert {place: float(s["step"]) for place, s in state.items()} == {p: float(s["step"]) for p, s in wanted.items()}
    assert len({float(s["step"]) for s in state.values()}) == 2


def test_the_device_has_exactly_the_first_elements(closing: Any) -> None:
    model = Model()
    total = sum(p.numel() for p in model.parameters())
    for ratio in (0.0, 0.1, 0.3, 0.5, 0.731, 0.999, 1.0):
        optimizer = closing(TwinFlowAdamW(model.parameters(), offload_ratio=ratio))
        kept = [on_device for on_device, _ in optimizer.homes if on_device]
        assert sum(on_host for _, on_host in optimizer.homes) == optimizer.offloaded == round(ratio * total)
        assert sum(kept) == optimizer.elements - optimizer.offloaded == total - round(ratio * total)
        sizes = [p.numel() for p in model.parameters()]
        assert kept[:-1] == sizes[: max(0, len(kept) - 1)]


def bf16_distance(one: torch.Tensor, other: torch.Tensor) -> int:
    """Largest distance in units in the last place."""
    ordered = [t.detach().contiguous().view(torch.int16).int() for t in (one, other)]
    ordered = [torch.where(t < 0, -(t & 0x7FFF), t) for t in ordered]
    return int((ordered[0] - ordered[1]).abs().max())


@pytest.mark.parametrize("ratio", [pytest.param(0.731, marks=pytest.mark.slow), 1.0])
def test_bf16_stays_within_two_units_in_the_last_place(ratio: float, closing: Any) -> None:
    """25 steps with the same gradients as fp32 master weights of torch's AdamW; clipped ones, some overflow."""
    ours, masters = Model(torch.bfloat16), Model(torch.bfloat16).float()
    optimizer = closing(TwinFlowAdamW(two_groups(ours), offload_ratio=ratio, max_norm=1.0))
    reference = torch.optim.AdamW(two_groups(masters))
    generator = torch.Generator().manual_seed(0)
    for step in range(25):
        size = (0.001, 0.1)[step % 2]
        for p, q in zip(ours.parameters(), masters.parameters(), strict=True):
            p.grad = (size * torch.randn(p.shape, generator=generator)).bfloat16()
            q.grad = p.grad.float()
        if step % 11 == 5:
            assert ours.second.weight.grad is not None
            ours.second.weight.grad[3, 4] = float("inf")
        else:
            nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
            reference.step()
        optimizer.step()
        assert bool(optimizer.skipped) == (step % 11 == 5)
    for p, q in zip(ours.parameters(), masters.parameters(), strict=True):
        assert bf16_distance(p, q.bfloat16()) <= 2
    state = optimizer.state_dict()["state"]
    assert {s["master"].dtype for s in state.values()} == {torch.float32}
    assert {float(s["step"]) for s in state.values()} == {23.0}


@every_pair(ratio=[0.3, 1.0], attached=[False, True], unscale=[False, True])
def test_a_grad_scaler_drives_it(ratio: float, attached: bool, unscale: bool, closing: Any) -> None:
    """One step overflows: it is skipped and the scale halves, as with torch's AdamW."""
    found = []
    for make in (lambda p: torch.optim.AdamW(p), lambda p: closing(TwinFlowAdamW(p, offload_ratio=ratio))):
        model = Model(torch.float32)
        optimizer, scaler = make(two_groups(model)), torch.amp.GradScaler("cpu", init_scale=1024.0)
        if attached and isinstance(optimizer, TwinFlowAdamW):
            optimizer.attach(model)
        for step in range(5):
            optimizer.zero_grad()
            loss = scaler.scale(model(inputs(step, torch.float32)))
            if attached and isinstance(optimizer, TwinFlowAdamW):
                with optimizer.last_backward():
                    loss.backward()
            else:
                loss.backward()
            if step == 2:
                assert model.third.weight.grad is not None
                model.third.weight.grad[0, 0] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        if isinstance(optimizer, TwinFlowAdamW):
            optimizer.finish()
        found.append(model)
        assert scaler.get_scale() == 512.0
    equal(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ratios", "dtype"), [((0.0, 1.0), torch.float64), ((1.0, 0.3), torch.float32), ((0.3, 0.731), torch.bfloat16)]
)
def test_saved_at_one_ratio_and_gone_on_at_another(
    ratios: tuple[float, float], dtype: torch.dtype, closing: Any
) -> None:
    """Exactly where the two shares compute alike (fp64), also when the model is loaded last."""
    straight = Model(dtype)
    train(straight, closing(TwinFlowAdamW(two_groups(straight), lr=1e-2, offload_ratio=ratios[0])), range(8))
    model = Model(dtype)
    saving = closing(TwinFlowAdamW(two_groups(model), lr=1e-2, offload_ratio=ratios[0]))
    train(model, saving, range(4))
    state, weights = copy.deepcopy(saving.state_dict()), copy.deepcopy(model.state_dict())
    for model_last in (False, True):
        for ratio in ratios:
            again = Model(dtype)
            optimizer = closing(TwinFlowAdamW(two_groups(again), lr=7.0, offload_ratio=ratio))
            if model_last:
                optimizer.load_state_dict(state)
            again.load_state_dict(weights)
            if not model_last:
                optimizer.load_state_dict(state)
            train(again, optimizer, range(4, 8))
            exact = (
                0.0 if ratio == ratios[0] else {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
            )
            equal(again, straight, rtol=exact, atol=exact / 10)


def test_state_goes_to_torchs_adamw_and_comes_from_it(closing: Any) -> None:
    plain, ours = Model(), Model()
    reference = torch.optim.AdamW(two_groups(plain), lr=1e-2)
    optimizer = closing(TwinFlowAdamW(two_groups(ours), lr=1e-2, offload_ratio=0.4))
    train(plain, reference, range(4))
    train(ours, optimizer, range(4))
    theirs, mine = reference.state_dict(), optimizer.state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for place, state in theirs["state"].items():
        assert mine["state"][place].keys() == state.keys()
        torch.testing.assert_close(mine["state"][place], dict(state), rtol=1e-12, atol=1e-12)
    plain2, ours2 = Model(), Model()
    plain2.load_state_dict(ours.state_dict())
    ours2.load_state_dict(plain.state_dict())
    reference2 = torch.optim.AdamW(two_groups(plain2))
    optimizer2 = closing(TwinFlowAdamW(two_groups(ours2), offload_ratio=0.7))
    reference2.load_state_dict(copy.deepcopy(mine))
    optimizer2.load_state_dict(copy.deepcopy(theirs))
    assert [group["lr"] for group in optimizer2.param_groups] == [3e-2, 1e-2]
    for model, one in ((plain, reference), (plain2, reference2), (ours2, optimizer2)):
        train(model, one, range(4, 8))
        equal(model, plain, rtol=1e-12, atol=1e-12)


def test_masters_follow_parameters_changed_from_outside(closing: Any) -> None:
    """A fine-tuned model's weights, loaded after the optimizer was made."""
    plain, ours = Model(), Model()
    reference, optimizer = torch.optim.AdamW(plain.parameters()), closing(TwinFlowAdamW(ours.parameters()))
    train(plain, reference, range(2))
    train(ours, optimizer, range(2))
    for model in (plain, ours):
        with torch.no_grad():
            model.second.weight.mul_(0.5)
    train(plain, reference, range(2, 4))
    train(ours, optimizer, range(2, 4))
    equal(ours, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ratio", RATIOS)
def test_gradients_may_have_strides(ratio: float, closing: Any) -> None:
    weights = [nn.Parameter(torch.ones(64, dtype=torch.float64)) for _ in range(2)]
    ours = closing(TwinFlowAdamW(weights[:1], lr=0.1, offload_ratio=ratio))
    theirs = torch.optim.AdamW(weights[1:], lr=0.1)
    column = torch.arange(192, dtype=torch.float64).view(64, 3)[:, 1]
    for grad in (column, column[:1].expand(64)):
        for weight, optimizer in zip(weights, (ours, theirs), strict=True):
            weight.grad = grad
            optimizer.step()
    ours.close()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-12)


def test_every_problem_is_told_at_once() -> None:
    leaf = torch.zeros(3, requires_grad=True)
    wrong = [
        torch.zeros(2, dtype=torch.complex64, requires_grad=True),
        torch.zeros(2, 2).to_sparse().requires_grad_(),
        leaf * 2,
        torch.zeros(2, 3).t().requires_grad_(),
    ]
    with pytest.raises(ValueError) as told:
        TwinFlowAdamW(wrong, lr=-1.0, offload_ratio=1.5, max_norm=-2.0, speculation="maybe", threads=0)
    for words in (
        "parameter 0 is complex64",
        "parameter 1 is sparse",
        "parameter 2 is no leaf",
        "parameter 3 is not contiguous",
        "lr is -1.0",
        "offload_ratio is 1.5",
        "max_norm is -2.0",
        "speculation is 'maybe'",
        "threads is 0",
    ):
        assert words in str(told.value)
    with pytest.raises(ValueError, match="no parameters"):
        TwinFlowAdamW([])
    with pytest.raises(ValueError, match="fp64 parameters cannot share"):
        TwinFlowAdamW([leaf, torch.zeros(2, dtype=torch.float64, requires_grad=True)])
