"""Units' gradients on their way: in one order, in the reduction's dtype, in padded memory."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gptpar.engine import gradient_memory, reducer
from gptpar.engine.collector import GradientCollector
from gptpar.engine.data_axes import DataAxes
from gptpar.engine.gradient_memory import GradientMemory
from gptpar.engine.ranges import Place
from gptpar.engine.reducer import GradientReducer
from gptpar.engine.step_graph import GraphBreaks
from gptpar.engine.table import ParameterTable
from gptpar.engine.units import Unit
from gptpar.topology.mesh import COPIES, Mesh
from tests.unit.engine.small_units import infos


def two_processes(zero_stage: int = 0) -> DataAxes:
    groups: dict[tuple[str, ...], Any] = {COPIES: object()}
    return DataAxes(Place(Mesh(data=2), 0, zero_stage), groups)


def make_gradients(
    units: list[Unit],
    axis: DataAxes,
    *,
    done: Callable[[str], None] = lambda unit: None,
    ratio: float = 0.0,
    ahead: bool = False,
    subscriber: Any = None,
    reduce_dtype: torch.dtype = torch.float32,
    **order: bool,
) -> GradientCollector:
    table = ParameterTable(units, axis.place, ratio=ratio)
    memory = GradientMemory(table, axis, torch.float32, torch.device("cpu"), ahead=ahead)
    sums = GradientReducer(memory, reduce_dtype, subscriber, GraphBreaks())
    return GradientCollector([[unit.name for unit in units]], sums, lambda unit, _: done(unit), **order)


def test_units_are_reduced_in_one_order_whatever_autograd_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives match by their order alone: it must not depend on which gradient came first, or came at all."""
    started: list[int] = []
    done: list[str] = []

    def all_reduce(piece: torch.Tensor, group: object, async_op: bool) -> SimpleNamespace:
        started.append(int(piece.storage_offset()))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(reducer.dist, "all_reduce", all_reduce)
    axis = two_processes()
    for arrivals in ("cba", "abc", "bca", "b"):
        parameters = {name: torch.nn.Parameter(torch.ones(8, 8)) for name in "abc"}
        units = [Unit.of(f"unit {name}", infos({name: (8, 8)}), 1) for name in "abc"]
        total = make_gradients(units, axis, done=done.append)
        total.memory.shard.fill_(7.0)  # of an earlier step
        total.watch(parameters)
        total.begin(2)
        total.begin_backward(0, last=False)
        (2 * parameters["b"] + parameters["b"]).sum().backward()  # used twice, in an earlier micro-batch
        total.end_backward()
        assert started == []
        done.clear()
        total.begin_backward(0, last=True)
        for name in arrivals:
            parameters[name].sum().backward()
        total.end_backward()
        total.reducer.finish()
        assert started == [128, 64, 0] and done == ["unit c", "unit b", "unit a"]
        assert all(parameter.grad is None for parameter in parameters.values())
        started.clear()
        done.clear()
        expected = {f"unit {n}": [(3.0 if n == "b" else 0.0) + (n in arrivals)] for n in "abc"}
        assert {name: view.unique().tolist() for name, view in total.memory.shards.items()} == expected


def test_units_that_are_read_late_hold_back_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """At first the late unit's successors wait for it; when processes have agreed, they go before it."""

    def all_reduce(piece: torch.Tensor, group: object, async_op: bool) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(reducer.dist, "all_reduce", all_reduce)
    parameters = {name: torch.nn.Parameter(torch.ones(8, 8)) for name in "abc"}
    units = [Unit.of(f"unit {name}", infos({name: (8, 8)}), 1) for name in "abc"]
    done: list[str] = []
    total = make_gradients(units, two_processes(), done=done.append)
    total.watch(parameters)
    seen = []
    for agrees in (False, False, True):
        if agrees:
            total.hand_on_last([False, True, True])  # unit b is read late on another process
        total.begin(1)
        total.begin_backward(0, last=True)
        for name in "cba":
            parameters[name].sum().backward()
            seen.append(list(done))
        assert total.reads_late("c")
        total.end_backward()
        total.reducer.finish()
        seen.append(list(done))
        done.clear()
        assert total.late_units == [False, agrees, True]
    first, second, third = seen[:4], seen[4:8], seen[8:]
    assert first == [["unit c"], ["unit c", "unit b"], *[["unit c", "unit b", "unit a"]] * 2]
    assert second == [[], [], [], ["unit c", "unit b", "unit a"]]
    assert third == [[], [], ["unit a"], ["unit a", "unit c", "unit b"]]


def test_gradients_travel_in_the_reductions_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are rounded once, after this process's sum, and the result is as wide as sums are."""
    sent: list[torch.dtype] = []

    def all_reduce(piece: torch.Tensor, group: object, async_op: bool) -> SimpleNamespace:
        sent.append(piece.dtype)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(reducer.dist, "all_reduce", all_reduce)
    axis = two_processes()
    unit = Unit.of("unit", infos({"a": (8, 8)}), 1)
    total = make_gradients([unit], axis, reduce_dtype=torch.bfloat16)
    parameter = torch.nn.Parameter(torch.ones(8, 8))
    total.watch({"a": parameter})
    total.begin(2)
    for micro_batch, factor in enumerate((1.0, 2.0**-9)):
        total.begin_backward(0, last=micro_batch == 1)
        (factor * parameter).sum().backward()
        total.end_backward()
    total.reducer.finish()
    assert sent == [torch.bfloat16]
    assert total.memory.shard.dtype == torch.float32
    assert total.memory.shard.unique().tolist() == [1.0]  # 1 + 2^-9 is a quarter of the distance to the next bf16


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_reductions_of_a_dropped_step_are_waited_for_and_not_added(
    monkeypatch: pytest.MonkeyPatch, zero_stage: int
) -> None:
    """A user's zero_grad(), or an error in a backward pass, leaves reductions behind that have not ended."""
    under_way: list[object] = []

    def begin(*_: Any, **__: Any) -> SimpleNamespace:
        work = SimpleNamespace()
        work.wait = lambda: under_way.remove(work)
        under_way.append(work)
        return work

    def reduce_scatter(into: torch.Tensor, sent: torch.Tensor, **_: Any) -> SimpleNamespace:
        into.copy_(sent[: len(into)])
        return begin()

    monkeypatch.setattr(reducer.dist, "all_reduce", begin)
    monkeypatch.setattr(reducer, "reduce_scatter_single", reduce_scatter)
    parameters = {name: torch.nn.Parameter(torch.ones(8, 8)) for name in "abc"}
    units = [Unit.of(f"unit {name}", infos({name: (8, 8)}), 2 if zero_stage else 1) for name in "abc"]
    total = make_gradients(units, two_processes(zero_stage))
    total.watch(parameters)

    def backward(factor: float, *, last: bool) -> None:
        total.begin_backward(0, last=last)
        sum((factor * parameter).sum() for parameter in parameters.values()).backward()  # type: ignore[union-attr]
        total.end_backward()

    for dropped_in_last in (False, True):
        total.begin(2)
        backward(8.0, last=dropped_in_last)
        assert under_way or zero_stage < 2 and not dropped_in_last
        total.begin(2)
        assert not under_way
        backward(1.0, last=False)
        backward(2.0, last=True)
        total.reducer.finish()
        assert not under_way and total.memory.shard.unique().tolist() == [3.0]


def test_padding_of_memory_that_is_taken_ahead_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it cannot be zeroed, since the host may not have fetched the last step's gradient; gaps count, too."""
    unit = Unit.of("unit", infos({"a": (3, 5), "b": (10, 10), "c": (64, 2)}), 1)
    assert unit.padding == ((15, 64), (164, 192)) and unit.length == 320
    submitted: list[torch.Tensor] = []
    subscriber = SimpleNamespace(submit_gradient=lambda _, grad: submitted.append(grad), sums=None)
    total = make_gradients([unit], DataAxes(), ratio=1.0, ahead=True, subscriber=subscriber)
    parameters = {name: torch.nn.Parameter(torch.ones(param.shape)) for name, param in unit.params.items()}
    total.watch(parameters)
    empty = torch.empty
    monkeypatch.setattr(gradient_memory.torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(math.nan))
    total.begin(1)
    total.begin_backward(0, last=True)
    sum(parameter.sum() for parameter in parameters.values()).backward()  # type: ignore[union-attr]
    total.end_backward()
    total.reducer.finish()
    assert submitted[0].sum().item() == 15 + 100 + 128
