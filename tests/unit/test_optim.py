"""Schedules, loss scale, flat buffers and the optimizer."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from gptpar.data.loader import MicroBatch
from gptpar.errors import GptparError
from gptpar.optim import gradients
from gptpar.optim.flat import ALIGNMENT, FlatLayout, l2_norm
from gptpar.optim.gradients import GradientSum
from gptpar.optim.loss_scale import LossScale
from gptpar.optim.schedule import make_schedule
from tests.helpers import make_trainer, random_tokens, tiny_config


def rates(flags: str, at: list[float]) -> list[float]:
    """Rates of a run of 500 steps of 2 samples."""
    schedule = make_schedule(tiny_config(f"--train-iters 500 {flags}"), 1000)
    return [schedule.learning_rate(n) for n in at]


def test_linear_decay_with_warmup_in_samples() -> None:
    flags = "--lr-warmup-iters 50 --min-lr 1e-3"  # 2 samples a step
    expected = [0.0, 5e-3, 1e-2, 1e-3 + 0.5 * 9e-3, 1e-3, 1e-3]
    assert rates(flags, [0, 50, 100, 550, 1000, 5000]) == pytest.approx(expected, rel=1e-12)


def test_cosine_decay_and_initial_rate() -> None:
    got = rates("--lr-decay-style cosine --lr-warmup-fraction 0.1 --lr-warmup-init 1e-4", [0, 50, 325, 1000, 1001])
    quarter = 0.5 * (math.cos(math.pi * 0.25) + 1) * 1e-2
    assert got == pytest.approx([1e-4, 1e-4 + 0.5 * 9.9e-3, quarter, 0.0, 0.0], rel=1e-12, abs=1e-18)


def test_constant_inverse_square_root_and_no_warmup() -> None:
    assert rates("--lr-decay-style constant", [0, 10**6]) == [1e-2, 1e-2]
    got = rates("--lr-decay-style inverse-square-root --lr-warmup-iters 50 --min-lr 4e-3", [100, 400, 900])
    assert got == pytest.approx([1e-2, 5e-3, 4e-3], rel=1e-12)


@pytest.mark.parametrize(
    ("style", "half"),
    [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)],
)
def test_wsd_tails(style: str, half: float) -> None:
    flags = f"--lr-decay-style WSD --lr-wsd-decay-iters 100 --lr-wsd-decay-style {style}"
    expected = [1e-2, 1e-2, half * 1e-2, 0.0]
    assert rates(flags, [10, 800, 900, 1000]) == pytest.approx(expected, rel=1e-12, abs=1e-18)


def test_token_schedule_counts_tokens() -> None:
    flags = "--lr-decay-tokens 1600 --lr-warmup-tokens 160"
    assert rates(flags, [80, 160, 880, 1600]) == pytest.approx([5e-3, 1e-2, 5e-3, 0.0], rel=1e-12, abs=1e-18)
    assert make_schedule(tiny_config(flags), 100).in_tokens


def test_an_evaluation_alone_needs_no_learning_rate() -> None:
    schedule = make_schedule(tiny_config("--skip-train --load .").update("optimizer", lr=None), 0)
    assert (schedule.max_lr, schedule.total) == (0.0, 0)


@pytest.mark.parametrize(("style", "half"), [("linear", 0.2), ("cosine", 0.2)])
def test_weight_decay_grows(style: str, half: float) -> None:
    flags = f"--weight-decay-incr-style {style} --start-weight-decay 0.1 --end-weight-decay 0.3"
    schedule = make_schedule(tiny_config(flags), 1000)
    got = [schedule.weight_decay(n) for n in (0, 500, 1000, 2000)]
    assert got == pytest.approx([0.1, half, 0.3, 0.3], rel=1e-12)


def test_dynamic_loss_scale_follows_megatron() -> None:
    scale = LossScale(16.0, dynamic=True, minimum=1.0, window=2, hysteresis=2, tolerance=2)
    seen = []
    for overflow in (True, True, True, False, False, True, False, True):
        scale.update(overflow)
        seen.append(scale.value)
    # The first overflow is tolerated; two good steps double the scale and restore the tolerance.
    assert seen == [16.0, 8.0, 4.0, 4.0, 8.0, 8.0, 8.0, 4.0]


def test_a_window_shortened_on_resume_still_lets_the_scale_grow() -> None:
    scale = LossScale(8.0, dynamic=True, window=2, hysteresis=2)
    scale.load(LossScale(16.0, dynamic=True, window=1000, good_steps=700).state())
    scale.update(False)
    assert (scale.value, scale.good_steps) == (32.0, 0)


def test_loss_scale_at_its_minimum_stops_the_run() -> None:
    scale = LossScale(2.0, dynamic=True, minimum=1.0, hysteresis=1, tolerance=1)
    scale.update(True)
    with pytest.raises(GptparError, match="already at its minimum"):
        scale.update(True)


def test_layout_is_reversed_aligned_and_split_by_decay() -> None:
    shapes = {
        "first.weight": torch.Size((3, 5)),
        "first.bias": torch.Size((2, 7)),  # a bias stays without decay whatever its shape
        "norm.weight": torch.Size((5,)),
        "last.weight": torch.Size((65,)),
        "last.matrix": torch.Size((10, 10)),
    }
    layout = FlatLayout.of(shapes)
    assert list(layout.slots) == ["last.matrix", "first.weight", "last.weight", "norm.weight", "first.bias"]
    assert [slot.start for slot in layout.slots.values()] == [0, 128, 192, 320, 384]
    assert (layout.decayed, layout.length) == (192, 448)
    assert all(slot.start % ALIGNMENT == 0 for slot in layout.slots.values())
    buffer = torch.arange(layout.length)
    assert layout.views(buffer)["norm.weight"].tolist() == [320, 321, 322, 323, 324]


def test_norm_of_a_long_buffer_is_exact() -> None:
    """Summed in one go, fp32 is 3 % off here."""
    assert l2_norm(torch.full((50_000_000,), 0.1)).item() == pytest.approx(0.1 * 50e6**0.5, rel=1e-6)


def test_buckets_are_reduced_in_one_order_whatever_autograd_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives match by their order alone: it must not depend on which gradient came first, or came at all."""
    monkeypatch.setattr(gradients, "BUCKET_ELEMENTS", 64)
    started: list[int] = []

    def all_reduce(piece: torch.Tensor, group: object, async_op: bool) -> SimpleNamespace:
        started.append(piece.storage_offset())
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(gradients.dist, "all_reduce", all_reduce)
    for arrivals in ("cba", "abc", "bca", "b"):
        parameters = {name: torch.nn.Parameter(torch.ones(8, 8)) for name in "abc"}
        layout = FlatLayout.of({name: p.shape for name, p in parameters.items()})
        total = GradientSum(parameters, layout, torch.full((layout.length,), 7.0), group=object())  # type: ignore[arg-type]
        total.begin()
        (2 * parameters["b"] + parameters["b"]).sum().backward()  # used twice, in an earlier micro-batch
        total.expect_last()
        for name in arrivals:
            parameters[name].sum().backward()
        total.finish()
        assert started == [0, 64, 128]
        started.clear()
        expected = {name: (3.0 if name == "b" else 0.0) + (name in arrivals) for name in "abc"}
        assert {name: view.unique().tolist() for name, view in total.views.items()} == {
            n: [v] for n, v in expected.items()
        }


def step_once(trainer, poison: float = 0.0) -> list[float]:  # type: ignore[no-untyped-def]
    tokens = random_tokens(2, 16, 60)
    loss = trainer.forward_backward([MicroBatch(tokens[:, :-1], tokens[:, 1:])], 0)
    if poison:
        trainer.model.optimizer.grad[5] = poison
    return trainer.update(loss, iteration=1, samples=2, progress=100, stop=False).readings.read()


@pytest.mark.parametrize(("flags", "poison"), [("", "inf"), ("", "nan"), ("--fp64", "inf"), ("--fp64", "nan")])
def test_a_gradient_that_is_not_finite_changes_nothing(flags: str, poison: str) -> None:
    trainer = make_trainer(tiny_config(flags))
    step_once(trainer)
    optimizer = trainer.model.optimizer
    before = [b.clone() for b in (optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq)]
    _, norm, skipped, _ = step_once(trainer, float(poison))
    assert skipped == 1 and not math.isfinite(norm) and optimizer.steps_taken == 1
    for was, now in zip(before, (optimizer.master, optimizer.exp_avg, optimizer.exp_avg_sq), strict=True):
        assert torch.equal(was, now)
    assert step_once(trainer)[2] == 0 and optimizer.steps_taken == 2


@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --loss-scale 1024"])
def test_sixteen_bit_weights_are_the_rounded_masters(flags: str) -> None:
    trainer = make_trainer(tiny_config(flags))
    norms = [step_once(trainer)[1] for _ in range(3)]
    optimizer = trainer.model.optimizer
    assert optimizer.master.dtype == torch.float32
    assert torch.equal(optimizer.live, optimizer.master.to(optimizer.live.dtype))
    exact = make_trainer(tiny_config())
    assert norms == pytest.approx([step_once(exact)[1] for _ in range(3)], rel=0.05)


def test_fp16_loss_scale_leaves_the_step_unchanged() -> None:
    """Scaling by a power of two is exact, so the masters agree to fp16's rounding of the gradients."""
    results = []
    for scale in (256, 2048):
        trainer = make_trainer(tiny_config(f"--fp16 --loss-scale {scale}"))
        step_once(trainer)
        results.append(trainer.model.optimizer.grad.clone())  # the step has taken the scale out
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=1e-6)
