"""Schedules, loss scale, flat buffers and the optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gptpar.config.gradients import adds_gradients
from gptpar.data.loader import MicroBatch
from gptpar.engine import gradient_memory, reducer
from gptpar.engine.collector import GradientCollector
from gptpar.engine.data_axis import DataAxis
from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.gradients import Gradients
from gptpar.engine.master_optimizer import MasterOptimizer
from gptpar.engine.ranges import Place
from gptpar.engine.reducer import GradientReducer
from gptpar.engine.router import GradientRouter
from gptpar.engine.step_graph import Cuts
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.errors import GptparError
from gptpar.optim.adamw import ADAMW
from gptpar.optim.grad_norm import GradientNorm, square_of
from gptpar.optim.loss_scale import LossScale
from gptpar.optim.schedule import make_schedule
from gptpar.optim.spans import ALIGNMENT, DECAYS, DECAYS_NOT
from gptpar.pipeline.stage import ParameterInfo
from gptpar.tensor_parallel.axis import Split
from gptpar.topology.initial_values import Constant
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


def test_good_steps_are_counted_in_a_row() -> None:
    scale = LossScale(16.0, dynamic=True, window=3, hysteresis=3, tolerance=3)
    seen = []
    for overflow in (False, False, True, False, False, False):
        scale.update(overflow)
        seen.append(scale.value)
    assert seen == [16.0] * 5 + [32.0]


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


SHAPES = {
    "first.weight": (3, 5),
    "first.bias": (2, 7),  # a bias stays without decay whatever its shape
    "norm.weight": (5,),
    "last.weight": (65,),
    "last.matrix": (10, 10),
}


def infos(shapes: Mapping[str, tuple[int, ...]], splits: Mapping[str, Split] | None = None) -> dict[str, ParameterInfo]:
    return {
        n: ParameterInfo(torch.Size(s), (splits or {}).get(n), Constant(0.0), frozenset()) for n, s in shapes.items()
    }


def test_a_unit_is_aligned_and_ordered_by_kind() -> None:
    unit = Unit.of("layer", infos(SHAPES), 4)
    assert list(unit.params) == ["first.weight", "last.matrix", "first.bias", "norm.weight", "last.weight"]
    assert [param.start for param in unit.params.values()] == [0, 64, 192, 256, 320]
    assert [param.end for param in unit.params.values()] == [64, 192, 256, 320, 448]
    assert (unit.length, unit.shard_length) == (512, 128)
    assert Unit.of("layer", infos(SHAPES), 3).length == 576 and Unit.of("layer", infos(SHAPES), 1).length == 448
    assert all(param.start % ALIGNMENT == 0 for param in unit.params.values())
    assert unit.views(torch.arange(512))["norm.weight"].tolist() == [256, 257, 258, 259, 260]
    assert unit.views(torch.arange(512))["last.matrix"].shape == (10, 10)


def test_uneven_shares_reserve_the_longest() -> None:
    """Every tensor rank's parameters begin at the same places: their collectives over the data axis stay alike."""
    shapes = {"norm.weight": (5,), "tokens.weight": (12, 8), "head.weight": (3, 4)}
    longest = {"tokens.weight": Split(0, 25, 0, 13)}
    short = Unit.of("ends", infos(shapes, longest), 2)
    long = Unit.of("ends", infos({**shapes, "tokens.weight": (13, 8)}, {"tokens.weight": Split(0, 25, 12, 13)}), 2)
    assert list(short.params) == ["head.weight", "norm.weight", "tokens.weight"]
    assert [(s.start, s.end) for s in short.params.values()] == [(s.start, s.end) for s in long.params.values()]
    assert [u.params["tokens.weight"].stop for u in (short, long)] == [128 + 96, 128 + 104]
    assert short.length == long.length == 256
    assert [param.replicated for param in short.params.values()] == [True, True, False]


def table_of(unit: Unit, shard: int = 0, tensor_rank: int = 0) -> ParameterTable:
    return ParameterTable([unit], Place(unit.shards, shard, tensor_rank=tensor_rank))


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_hold_every_element_once(shards: int) -> None:
    unit = Unit.of("layer", infos(SHAPES, {"last.matrix": Split(1, 20, 10, 10)}), shards)
    times = {name: torch.zeros(param.shape.numel()) for name, param in unit.params.items()}
    for shard in range(shards):
        for one in table_of(unit, shard).ranges():
            assert 0 <= one.first < one.first + one.length
            times[one.param][one.first : one.first + one.length] += 1
    assert all(bool((counts == 1).all()) for counts in times.values())


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_spans_are_disjoint_and_say_how_each_element_is_treated(shards: int) -> None:
    """On the second tensor-parallel rank, which counts what it alone has."""
    unit = Unit.of("layer", infos(SHAPES, {"last.matrix": Split(1, 20, 10, 10)}), shards)
    treated = torch.full((unit.length, 2), -1)
    for shard in range(shards):
        table, low, stop = table_of(unit, shard, tensor_rank=1), shard * unit.shard_length, 0
        for span in table.spans("layer"):
            assert stop <= span.start < span.stop <= unit.shard_length
            treated[low + span.start : low + span.stop] = torch.tensor([span.group, 0])
            stop = span.stop
        for start, stop in table.counted("layer"):
            treated[low + start : low + stop, 1] = 1
    for param in unit.params.values():
        assert treated[param.start : param.end].unique(dim=0).tolist() == [[param.group, not param.replicated]]
    assert int((treated[:, 0] >= 0).sum()) == sum(param.end - param.start for param in unit.params.values())
    whole = table_of(Unit.of("l", infos(SHAPES), 1))
    assert [span.group for span in whole.spans("l")] == [DECAYS, DECAYS_NOT] and whole.counted("l") == [(0, 448)]


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_what_is_summed_lies_together_and_is_the_same_on_all_tensor_ranks(shards: int) -> None:
    """Messages over the tensor axis match by their lengths, however uneven the ranks' shares."""
    messages = []
    for rows, start in ((12, 0), (13, 12)):
        known = infos({**SHAPES, "tokens.weight": (rows, 8)}, {"tokens.weight": Split(0, 25, start, 13)})
        for name in ("norm.weight", "last.matrix"):
            known[name] = replace(known[name], grad_sums=frozenset({"tensor"}))
        unit = Unit.of("layer", known, shards)
        assert [name for name, param in unit.params.items() if param.info.grad_sums] == ["last.matrix", "norm.weight"]
        summed = [table_of(unit, shard).messages("layer", "tensor") for shard in range(shards)]
        assert sum(stop - start for parts in summed for start, stop in parts) == 128 + 64
        messages.append(summed)
    assert messages[0] == messages[1]


def make_optimizer(unit: Unit, grad: torch.Tensor, shard: int = 0, tensor_rank: int = 0) -> MasterOptimizer:
    return MasterOptimizer(ADAMW, table_of(unit, shard, tensor_rank), grad, clip_grad=1.0)


def square_of_grad(table: ParameterTable, grad: torch.Tensor) -> torch.Tensor:
    (unit,) = table.units
    norm = GradientNorm({unit.name: table.counted(unit.name)})
    norm.take(norm.measured({unit.name: grad}))
    return norm.square(grad.device)


def test_norm_of_a_long_buffer_is_exact() -> None:
    """Summed in one go, fp32 is 3 % off here."""
    shapes = {"a.weight": (25_000_000,), "b.weight": (5000, 5000)}
    unit = Unit.of("long", infos(shapes), 1)
    grad = torch.zeros(unit.length)
    for view in unit.views(grad).values():
        view.fill_(0.1)
    square = square_of_grad(table_of(unit), grad)
    assert square.dtype == torch.float64
    assert square.sqrt().item() == pytest.approx(0.1 * 50e6**0.5, rel=1e-6)


def test_only_zeros_of_parameters_are_counted() -> None:
    """The gaps between parameters are zeros too; of two shards each counts its own."""
    unit = Unit.of("layer", infos(SHAPES), 2)
    whole = torch.zeros(unit.length)
    for view in unit.views(whole).values():
        view.fill_(1.0)
    unit.views(whole)["last.matrix"][3:5] = 0
    unit.views(whole)["last.weight"][7] = 0
    counts = [make_optimizer(unit, grad, k).zeros_in_grad() for k, grad in enumerate(whole.chunk(2))]
    assert counts == [20, 1]
    grad = whole.chunk(2)[0]
    assert make_optimizer(unit, grad, tensor_rank=1).zeros_in_grad() == 0
    assert square_of_grad(table_of(unit, tensor_rank=1), grad).item() == 0


def test_a_norm_of_any_length_is_exact() -> None:
    grad = torch.linspace(-1, 1, 1000)
    pieces = [grad[:1], grad[1:130], grad[130:130], grad[130:]]
    assert square_of(pieces, grad.device).item() == pytest.approx(float(grad.double().square().sum()), rel=1e-6)
    narrow = [piece.bfloat16() for piece in pieces]
    exact = float(torch.cat(narrow).double().square().sum())
    assert square_of(narrow, grad.device).item() == pytest.approx(exact, rel=1e-6)  # not rounded to 8 bits


def make_gradients(
    units: list[Unit],
    axis: DataAxis,
    *,
    done: Callable[[str], None] = lambda name: None,
    ratio: float = 0.0,
    ahead: bool = False,
    subscriber: Any = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> Gradients:
    table = ParameterTable(units, Place(axis.shards, axis.shard), ratio=ratio)
    memory = GradientMemory(table, axis, torch.float32, torch.device("cpu"), ahead=ahead)
    router = GradientRouter(table, memory, None, {}, subscriber, Cuts(), counts_zeros=False)
    sums = GradientReducer(memory, axis, reduce_dtype, router)
    return Gradients(
        memory, GradientCollector(units, [[unit.name for unit in units]], memory, sums, done), sums, router
    )


def test_units_are_reduced_in_one_order_whatever_autograd_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives match by their order alone: it must not depend on which gradient came first, or came at all."""
    started: list[int] = []
    done: list[str] = []

    def all_reduce(piece: torch.Tensor, group: object, async_op: bool) -> SimpleNamespace:
        started.append(int(piece.storage_offset()))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(reducer.dist, "all_reduce", all_reduce)
    axis = DataAxis(2, 0, object())  # type: ignore[arg-type]
    for arrivals in ("cba", "abc", "bca", "b"):
        parameters = {name: torch.nn.Parameter(torch.ones(8, 8)) for name in "abc"}
        units = [Unit.of(f"unit {name}", infos({name: (8, 8)}), 1) for name in "abc"]
        total = make_gradients(units, axis, done=done.append)
        total.shard.fill_(7.0)  # of an earlier step
        total.collector.watch(parameters)
        total.begin(2)
        total.begin_backward(0, last=False)
        (2 * parameters["b"] + parameters["b"]).sum().backward()  # used twice, in an earlier micro-batch
        total.end_backward()
        assert started == []
        total.begin_backward(0, last=True)
        for name in arrivals:
            parameters[name].sum().backward()
        total.end_backward()
        total.finish()
        assert started == [128, 64, 0] and done == ["unit c", "unit b", "unit a"]
        assert all(parameter.grad is None for parameter in parameters.values())
        started.clear()
        done.clear()
        expected = {f"unit {n}": [(3.0 if n == "b" else 0.0) + (n in arrivals)] for n in "abc"}
        assert {name: view.unique().tolist() for name, view in total.shards.items()} == expected


def test_gradients_travel_in_the_reductions_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are rounded once, after this process's sum, and the result is as wide as sums are."""
    sent: list[torch.dtype] = []

    def all_reduce(piece: torch.Tensor, group: object, async_op: bool) -> SimpleNamespace:
        sent.append(piece.dtype)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(reducer.dist, "all_reduce", all_reduce)
    axis = DataAxis(2, 0, object())  # type: ignore[arg-type]
    unit = Unit.of("unit", infos({"a": (8, 8)}), 1)
    total = make_gradients([unit], axis, reduce_dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.ones(8, 8))
    total.collector.watch({"a": parameter})
    total.begin(2)
    for micro_batch, factor in enumerate((1.0, 2.0**-9)):
        total.begin_backward(0, last=micro_batch == 1)
        (factor * parameter).sum().backward()
        total.end_backward()
    total.finish()
    assert sent == [torch.bfloat16]
    assert total.shard.dtype == torch.float32
    assert total.shard.unique().tolist() == [1.0]  # 1 + 2^-9 is a quarter of the distance to the next bf16


def test_padding_of_memory_that_is_taken_ahead_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it cannot be zeroed, since the host may not have fetched the last step's gradient; gaps count, too."""
    unit = Unit.of("unit", infos({"a": (3, 5), "b": (10, 10), "c": (64, 2)}), 1)
    assert list(unit.padding()) == [(15, 64), (164, 192)] and unit.length == 320
    submitted: list[torch.Tensor] = []
    subscriber = SimpleNamespace(submit_gradient=lambda _, grad: submitted.append(grad))
    total = make_gradients([unit], DataAxis(1, 0, None), ratio=1.0, ahead=True, subscriber=subscriber)
    parameters = {name: torch.nn.Parameter(torch.ones(param.shape)) for name, param in unit.params.items()}
    total.collector.watch(parameters)
    monkeypatch.setattr(gradient_memory.torch, "empty", lambda n, **k: torch.full((n,), math.nan, **k))
    total.begin(1)
    total.begin_backward(0, last=True)
    sum(parameter.sum() for parameter in parameters.values()).backward()  # type: ignore[union-attr]
    total.end_backward()
    total.finish()
    assert submitted[0].sum().item() == 15 + 100 + 128


def step_once(trainer, poison: float = 0.0) -> list[float]:  # type: ignore[no-untyped-def]
    tokens = random_tokens(2, 16, 60)
    loss = trainer.forward_backward([MicroBatch(tokens[:, :-1], tokens[:, 1:])], 0)
    if poison:
        trainer.engine.optimizer.grad[5] = poison
    return trainer.update(loss, iteration=1, samples=2, progress=100, stop=False).readings.read()


@pytest.mark.parametrize(("flags", "poison"), [("", "inf"), ("", "nan"), ("--fp64", "inf"), ("--fp64", "nan")])
def test_a_gradient_that_is_not_finite_changes_nothing(flags: str, poison: str) -> None:
    trainer = make_trainer(tiny_config(flags))
    step_once(trainer)
    optimizer = trainer.engine.optimizer
    before = [b.clone() for b in optimizer.vectors.values()]
    _, norm, skipped, _ = step_once(trainer, float(poison))
    assert skipped == 1 and not math.isfinite(norm) and optimizer.steps_taken == 1
    for was, now in zip(before, optimizer.vectors.values(), strict=True):
        assert torch.equal(was, now)
    assert step_once(trainer)[2] == 0 and optimizer.steps_taken == 2


@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --loss-scale 1024"])
def test_sixteen_bit_weights_are_the_rounded_masters(flags: str) -> None:
    trainer = make_trainer(tiny_config(flags))
    norms = [step_once(trainer)[1] for _ in range(3)]
    assert trainer.engine.optimizer.master.dtype == torch.float32
    masters, live = trainer.engine.optimizer.state_tensors()["weights"], trainer.engine.parameters.views()
    assert masters.keys() == live.keys() and {view.dtype for view in live.values()} != {torch.float32}
    for name, held in masters.items():
        ((_, master),) = held.parts
        assert torch.equal(live[name], master.to(live[name].dtype)), name
    exact = make_trainer(tiny_config())
    assert norms == pytest.approx([step_once(exact)[1] for _ in range(3)], rel=0.05)


def test_a_loss_scale_beyond_fp16_is_no_overflow() -> None:
    """Only gradients have to fit fp16's range, which ends at 65,504."""
    exact = make_trainer(tiny_config())
    norms = [step_once(exact)[1] for _ in range(2)]
    trainer = make_trainer(tiny_config("--fp16 --loss-scale 65536"))
    found = [step_once(trainer)[1:3] for _ in range(2)]
    assert [norm for norm, _ in found] == pytest.approx(norms, rel=0.05) and not any(skipped for _, skipped in found)


def test_only_sums_are_kept_in_fp32() -> None:
    """A gradient that comes once stays as it came; over micro-batches, processes or a growing batch it is a sum."""
    for flags, dtype in (
        ("--bf16", torch.bfloat16),
        ("--fp16", torch.float16),
        ("", torch.float32),
        ("--fp64", torch.float64),
        ("--bf16 --global-batch-size 4", torch.float32),
    ):
        optimizer = make_trainer(tiny_config(flags)).engine.optimizer
        assert optimizer.grad.dtype == dtype, flags
        wide = optimizer.master.element_size()
        assert optimizer.bytes_an_element == 3 * wide + dtype.itemsize
    growing = tiny_config().update("batch", rampup_batch_size=[2, 2, 4])
    assert [adds_gradients(c, size) for c, size in ((growing, 1), (tiny_config(), 2), (tiny_config(), 1))] == [1, 1, 0]
    trainer = make_trainer(tiny_config("--bf16"))
    with pytest.raises(AssertionError):
        trainer.engine.begin_gradients(2)


def test_fp16_loss_scale_leaves_the_step_unchanged() -> None:
    """Scaling by a power of two is exact, so the masters agree to fp16's rounding of the gradients."""
    results = []
    for scale in (256, 2048):
        trainer = make_trainer(tiny_config(f"--fp16 --loss-scale {scale}"))
        step_once(trainer)
        results.append(trainer.engine.optimizer.grad / scale)
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=1e-6)
