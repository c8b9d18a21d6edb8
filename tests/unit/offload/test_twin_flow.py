"""TwinFlowAdamW against torch.optim.AdamW: the same numbers for every ratio and way of calling it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gptpar import TwinFlowAdamW
from gptpar.offload.transfers import SameMemory
from tests.pairs import every_pair
from tests.unit.offload.two_groups import Beside, Model, backward, equal, inputs, scheduler, train, two_groups

RATIOS = [0.0, 0.3, 0.731, 1.0]


class LateNorm:
    """A norm that is not known yet when it is asked for first, so that there is time to speculate on any machine."""

    def __init__(self, number: torch.Tensor):
        self._number, self._asked = number, False

    def known(self) -> bool:
        asked, self._asked = self._asked, True
        return asked

    def value(self) -> float:
        return self._number.item()


@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [
        (torch.float64, 1e-12),
        pytest.param(torch.float32, 2e-5, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, None, marks=pytest.mark.slow),
    ],
)
def test_every_ratio_is_torchs_adamw_and_no_way_changes_a_bit(
    dtype: torch.dtype, rtol: float | None, closing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups, a schedule, accumulation, and a parameter that has no gradient in some steps.

    Some steps are clipped, which makes the speculation of an attached optimizer wrong: it is done again.
    """
    monkeypatch.setattr(SameMemory, "read_scalar", lambda self, number: LateNorm(number))
    plain, states = Model(dtype), []
    reference = torch.optim.AdamW(two_groups(plain), lr=1e-2)
    train(plain, reference, range(12), scheduler(reference), clip=0.45)
    taken = {place: float(held["step"]) for place, held in reference.state_dict()["state"].items()}
    assert set(taken.values()) == {8.0, 12.0}
    ways = [(ratio, False, "auto") for ratio in RATIOS]
    for ratio, attached, speculation in (*ways, (0.3, True, "on"), (1.0, True, "on"), (1.0, True, "off")):
        ours = Model(dtype)
        options = {"offload_ratio": ratio, "max_norm": 0.45, "speculation": speculation}
        optimizer = closing(TwinFlowAdamW(two_groups(ours), lr=1e-2, **options))
        if attached:
            optimizer.attach(ours)
        train(ours, optimizer, range(12), scheduler(optimizer))
        optimizer.finish()
        if rtol is not None:
            equal(ours, plain, rtol=rtol, atol=rtol)
        state = optimizer.state_dict()["state"]
        assert {place: float(held["step"]) for place, held in state.items()} == taken
        states.append([*ours.state_dict().values(), *(t for held in state.values() for t in held.values())])
        assert (0 < optimizer.num_redone < 12) == (attached and speculation == "on")
    for other in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, states[0], strict=True))


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


def test_bf16_stays_within_two_units_in_the_last_place(closing: Any) -> None:
    """25 steps with the same gradients as fp32 master weights of torch's AdamW; clipped ones, some overflow."""
    ours, masters = Model(torch.bfloat16), Model(torch.bfloat16).float()
    optimizer = closing(TwinFlowAdamW(two_groups(ours), offload_ratio=0.731, max_norm=1.0))
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
        torch.testing.assert_close(p.float(), q, rtol=2.0**-7, atol=0)  # at most two units
    state = optimizer.state_dict()["state"]
    assert {s["master"].dtype for s in state.values()} == {torch.float32}
    assert {float(s["step"]) for s in state.values()} == {23.0}


@every_pair(ratio=[0.3, 1.0], attached=[False, True], unscale=[False, True])
def test_a_grad_scaler_drives_it(ratio: float, attached: bool, unscale: bool, closing: Any) -> None:
    """One step overflows: it is skipped and the scale halves, as with torch's AdamW."""
    plain, ours = Model(torch.float32), Model(torch.float32)
    reference = torch.optim.AdamW(two_groups(plain))
    optimizer = closing(TwinFlowAdamW(two_groups(ours), offload_ratio=ratio))
    if attached:
        optimizer.attach(ours)
    for model, one in ((plain, reference), (ours, optimizer)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(5):
            one.zero_grad()
            backward(one, scaler.scale(model(inputs(step, torch.float32))))
            if step == 2:
                assert model.third.weight.grad is not None
                model.third.weight.grad[0, 0] = float("inf")
            if unscale:
                scaler.unscale_(one)
            scaler.step(one)
            scaler.update()
        assert scaler.get_scale() == 512.0
    optimizer.finish()
    equal(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_saved_at_one_ratio_and_gone_on_at_another(dtype: torch.dtype, closing: Any) -> None:
    """Bit for bit, also when the model is loaded last."""
    straight, model = Model(dtype), Model(dtype)
    train(straight, closing(TwinFlowAdamW(two_groups(straight), lr=1e-2, offload_ratio=0.0)), range(8))
    saving = closing(TwinFlowAdamW(two_groups(model), lr=1e-2, offload_ratio=0.731))
    train(model, saving, range(4))
    state, weights = copy.deepcopy(saving.state_dict()), copy.deepcopy(model.state_dict())
    for ratio, model_last in ((0.731, False), (1.0, False), (0.3, True)):
        again = Model(dtype)
        optimizer = closing(TwinFlowAdamW(two_groups(again), lr=7.0, offload_ratio=ratio))
        if model_last:
            optimizer.load_state_dict(state)
        again.load_state_dict(weights)
        if not model_last:
            optimizer.load_state_dict(state)
        train(again, optimizer, range(4, 8))
        equal(again, straight, rtol=0, atol=0)


def test_state_goes_to_torchs_adamw_and_comes_from_it(closing: Any) -> None:
    pair, crossed = closing(Beside(offload_ratio=0.4)), closing(Beside(offload_ratio=0.7))
    pair.train(range(4))
    theirs, mine = pair.reference.state_dict(), pair.optimizer.state_dict()
    assert mine["state"].keys() == theirs["state"].keys()
    for place, state in theirs["state"].items():
        assert mine["state"][place].keys() == state.keys()
        torch.testing.assert_close(mine["state"][place], dict(state), rtol=1e-12, atol=1e-12)
    crossed.plain.load_state_dict(pair.ours.state_dict())
    crossed.ours.load_state_dict(pair.plain.state_dict())
    for group in crossed.optimizer.param_groups:
        group["lr"] = 7.0
    crossed.reference.load_state_dict(copy.deepcopy(mine))
    crossed.optimizer.load_state_dict(copy.deepcopy(theirs))
    assert [group["lr"] for group in crossed.optimizer.param_groups] == [3e-2, 1e-2]
    for one in (pair, crossed):
        one.train(range(4, 8))
        one.assert_equal()
    equal(crossed.ours, pair.plain, rtol=1e-12, atol=1e-12)


def test_masters_follow_parameters_changed_from_outside(closing: Any) -> None:
    """A fine-tuned model's weights, loaded after the optimizer was made."""
    pair = closing(Beside())
    pair.train(range(2))
    for model, _ in pair.each():
        with torch.no_grad():
            model.second.weight.mul_(0.5)
    pair.train(range(2, 4))
    pair.assert_equal()


@pytest.mark.parametrize("ratio", RATIOS)
def test_masters_follow_parameters_that_are_changed_before_a_save(ratio: float, closing: Any) -> None:
    found = []
    for saves in (False, True):
        weight = nn.Parameter(torch.linspace(-1, 1, 64).bfloat16())
        optimizer = closing(TwinFlowAdamW([weight], lr=1e-2, offload_ratio=ratio))
        for step in range(2):
            (weight.float() * (step + 1)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                optimizer.finish()
                with torch.no_grad():
                    weight.mul_(0.5)
                if saves:
                    optimizer.load_state_dict(optimizer.state_dict())
        optimizer.finish()
        found.append(weight.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("ratio", RATIOS)
def test_gradients_may_have_strides(ratio: float) -> None:
    weights = [nn.Parameter(torch.ones(64, dtype=torch.float64)) for _ in range(2)]
    theirs = torch.optim.AdamW(weights[1:], lr=0.1)
    column = torch.arange(192, dtype=torch.float64).view(64, 3)[:, 1]
    with TwinFlowAdamW(weights[:1], lr=0.1, offload_ratio=ratio) as ours:
        for grad in (column, column[:1].expand(64)):
            for weight, optimizer in zip(weights, (ours, theirs), strict=True):
                weight.grad = grad
                optimizer.step()
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
    with pytest.raises(ValueError, match=r"groups \[1\] have no 'params'"):
        TwinFlowAdamW([{"params": nn.Linear(2, 1).parameters()}, {"lr": 1.0}])
    with pytest.raises(ValueError, match="fp64 parameters cannot share"):
        TwinFlowAdamW([leaf, torch.zeros(2, dtype=torch.float64, requires_grad=True)])
