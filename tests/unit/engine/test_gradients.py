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

THREE = [Unit.of(f"unit {name}", infos({name: (8, 8)}), 1) for name in "abc"]


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What has been given to all-reduces, which do nothing."""
    pieces: list[torch.Tensor] = []

    def all_reduce(piece: torch.Tensor, group: object, async_op: bool) -> SimpleNamespace:
        pieces.append(piece)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(reducer.dist, "all_reduce", all_reduce)
    return pieces


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
) -> tuple[GradientCollector, dict[str, torch.nn.Parameter]]:
    """The units' gradients, and the parameters that they are of, all of them 1."""
    table = ParameterTable(units, axis.place, ratio=ratio)
    memory = GradientMemory(table, axis, torch.float32, torch.device("cpu"), ahead=ahead)
    sums = GradientReducer(memory, reduce_dtype, subscriber, GraphBreaks())
    gradients = GradientCollector([[unit.name for unit in units]], sums, lambda unit, _: done(unit))
    params = {name: param for unit in units for name, param in unit.params.items()}
    parameters = {name: torch.nn.Parameter(torch.ones(param.shape)) for name, param in params.items()}
    gradients.watch(parameters)
    return gradients, parameters


def backward(gradients: GradientCollector, *losses: torch.Tensor, last: bool) -> None:
    """A micro-batch's backward passes, and with the last one the end of the reductions."""
    gradients.begin_backward(0, last=last)
    for loss in losses:
        loss.backward()
    gradients.end_backward()
    if last:
        gradients.reducer.finish()


def test_units_are_reduced_in_one_order_whatever_autograd_does(reduced: list[torch.Tensor]) -> None:
    """Collectives match by their order alone: it must not depend on which gradient came first, or came at all."""
    for arrivals in ("cba", "abc", "bca", "b"):
        done: list[str] = []
        total, parameters = make_gradients(THREE, two_processes(), done=done.append)
        total.memory.shard.fill_(7.0)  # of an earlier step
        total.begin(2)
        backward(total, (2 * parameters["b"] + parameters["b"]).sum(), last=False)  # used twice
        assert reduced == []
        done.clear()
        backward(total, *(parameters[name].sum() for name in arrivals), last=True)
        assert [int(piece.storage_offset()) for piece in reduced] == [128, 64, 0]
        assert done == ["unit c", "unit b", "unit a"]
        assert all(parameter.grad is None for parameter in parameters.values())
        reduced.clear()
        expected = {f"unit {n}": [(3.0 if n == "b" else 0.0) + (n in arrivals)] for n in "abc"}
        assert {name: view.unique().tolist() for name, view in total.memory.shards.items()} == expected


@pytest.mark.usefixtures("reduced")
def test_units_that_are_read_late_hold_back_no_others() -> None:
    """At first the late unit's successors wait for it; when processes have agreed, they go before it."""
    done: list[str] = []
    total, parameters = make_gradients(THREE, two_processes(), done=done.append)
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


def test_gradients_travel_in_the_reductions_dtype(reduced: list[torch.Tensor]) -> None:
    """They are rounded once, after this process's sum, and the result is as wide as sums are."""
    total, parameters = make_gradients(THREE[:1], two_processes(), reduce_dtype=torch.bfloat16)
    total.begin(2)
    for factor in (1.0, 2.0**-9):
        backward(total, (factor * parameters["a"]).sum(), last=factor != 1.0)
    assert [piece.dtype for piece in reduced] == [torch.bfloat16]
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
    units = [Unit.of(f"unit {name}", infos({name: (8, 8)}), 2 if zero_stage else 1) for name in "abc"]
    total, parameters = make_gradients(units, two_processes(zero_stage))

    def loss(factor: float) -> torch.Tensor:
        return torch.stack([(factor * parameter).sum() for parameter in parameters.values()]).sum()

    for dropped_in_last in (False, True):
        total.begin(2)
        total.begin_backward(0, last=dropped_in_last)
        loss(8.0).backward()
        total.end_backward()
        assert under_way or zero_stage < 2 and not dropped_in_last
        total.begin(2)
        assert not under_way
        backward(total, loss(1.0), last=False)
        backward(total, loss(2.0), last=True)
        assert not under_way and total.memory.shard.unique().tolist() == [3.0]


def test_padding_of_memory_that_is_taken_ahead_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it cannot be zeroed, since the host may not have fetched the last step's gradient; gaps count, too."""
    unit = Unit.of("unit", infos({"a": (3, 5), "b": (10, 10), "c": (64, 2)}), 1)
    assert unit.padding == ((15, 64), (164, 192)) and unit.length == 320
    submitted: list[torch.Tensor] = []
    subscriber = SimpleNamespace(submit_gradient=lambda _, grad: submitted.append(grad), sums=None)
    total, parameters = make_gradients([unit], DataAxes(), ratio=1.0, ahead=True, subscriber=subscriber)
    empty = torch.empty
    monkeypatch.setattr(gradient_memory.torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(math.nan))
    total.begin(1)
    backward(total, *(parameter.sum() for parameter in parameters.values()), last=True)
    assert submitted[0].sum().item() == 15 + 100 + 128
