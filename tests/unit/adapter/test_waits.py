"""Processes that would wait for each other for ever say so: their calls differ, or an error has ended one's pass."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gptpar.adapter.guards import failed_passes, order_watch
from gptpar.adapter.guards.agreement import REMEDY
from gptpar.adapter.guards.failed_passes import FailedPasses
from gptpar.adapter.guards.order_watch import ALL_CALL, OrderWatch
from gptpar.errors import GptparError
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh

BACKWARD, OPTIMIZER = "a backward pass", "the optimizer's step"
TOPOLOGIES = [Topology(Mesh(data=2), rank, torch.device("cpu")) for rank in range(2)]
"""Of two processes, here threads."""


@pytest.fixture(autouse=True)
def one_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OrderWatch]]:
    monkeypatch.setattr(order_watch, "LOOK_SECONDS_WITHOUT_UNITS", 0.02)
    made = [OrderWatch(topology) for topology in TOPOLOGIES]
    for one in made:
        one.start("engine", notes_units=False)
        one.begin_step(3)
    yield made
    for one in made:
        one.close()


class Endless:
    """A collective that never comes."""

    def wait(self) -> None:
        threading.Event().wait()


@pytest.mark.parametrize(
    ("mine", "others", "told"),
    [
        (["engine.save_checkpoint()"], [BACKWARD], f"engine.save_checkpoint(), rank 1 is at {BACKWARD}"),
        ([BACKWARD, BACKWARD, OPTIMIZER], [BACKWARD] * 3, f"{OPTIMIZER}, rank 1 is at {BACKWARD}"),
        (["engine.eval_batch()"], ["engine.close()"], "engine.eval_batch(), rank 1 is at engine.close()"),
        (["unit h.0", "unit h.2"], ["unit h.0", "unit h.1"], "unit h.2, rank 1 is at unit h.1"),
    ],
)
def test_an_endless_wait_is_an_error_that_names_both_calls(watches: Any, mine: Any, others: Any, told: str) -> None:
    for one, places in zip(watches, (mine, others), strict=True):
        for place in places:
            one.note(place)
    with pytest.raises(GptparError) as raised:
        watches[0].wait_for(Endless())
    said = str(raised.value)
    assert said.startswith("processes wait for each other in step 3, because they have made different calls: after ")
    remedy = REMEDY if "unit" in told else ALL_CALL
    assert said.endswith(f"{len(mine) - 1} equal calls, rank 0 is at {told}. The run cannot go on: end it. {remedy}")


def test_a_process_that_has_closed_its_engine_is_known_to_the_others(watches: list[OrderWatch]) -> None:
    watches[1].note(BACKWARD)
    watches[0].close()
    with pytest.raises(GptparError, match=r"rank 0 is at engine\.close\(\), rank 1 is at a backward pass"):
        watches[1].wait_for(Endless())


def test_the_loss_of_a_process_that_found_the_difference_is_told_as_the_difference(watches: list[OrderWatch]) -> None:
    watches[1].note(BACKWARD)
    watches[1]._publish()
    with pytest.raises(GptparError, match="rank 0 is at engine"), watches[0].together("save_checkpoint"):
        raise RuntimeError("Connection closed by peer")


def test_a_process_that_is_only_behind_is_told_once(
    watches: list[OrderWatch], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(order_watch, "TELL_SECONDS", 0.1)
    watches[1].note(BACKWARD)
    told = threading.Event()
    monkeypatch.setattr(watches[1], "_tell", lambda found, tell=watches[1]._tell: (tell(found), told.set()))
    assert told.wait(10)
    told.clear()
    assert not told.wait(0.2) and watches[1].error is None
    line = capfd.readouterr().err
    assert line.startswith("gptpar: rank 1 has waited 0.1 seconds at a backward pass of step 3: rank 0 was last ")
    assert line.count("\n") == 1


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def passes() -> list[FailedPasses]:
    return [FailedPasses(topology, "engine", OrderWatch(topology)) for topology in TOPOLOGIES]


def settled(passes: list[FailedPasses]) -> list[str]:
    """What each says, all at once: the part that differs."""

    def said(one: FailedPasses) -> str:
        try:
            one.settle()
        except GptparError as error:
            told, _, remedy = str(error).partition(". The others wait in theirs, so that the run cannot go on: ")
            assert remedy == "let the error end the process, and start again from a checkpoint."
            return told.removeprefix("an error ended a pass, but not the same pass on all processes: ")
        return ""

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(said, passes))


def test_what_failed_on_all_is_forgotten_again_and_again(passes: list[FailedPasses]) -> None:
    assert settled(passes) == ["", ""]
    for place in ("a forward pass of step 1", "a backward pass of step 1", "a forward pass of step 1"):
        for one in passes:
            one.note(place)
            one.note("what failed because of it")
        assert settled(passes) == ["", ""]


def test_other_passes_are_told_on_all(passes: list[FailedPasses]) -> None:
    passes[0].note("a forward pass")
    passes[1].note("a backward pass")
    assert settled(passes) == ["rank 0 met an error in a forward pass, rank 1 met an error in a backward pass"] * 2


def test_a_process_that_is_alone_does_not_go_on(passes: list[FailedPasses], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_passes, "WAIT_SECONDS", 0.1)
    passes[1].note("a forward pass")
    told = "rank 0 told of none within 0.1 seconds, rank 1 met an error in a forward pass"
    for _ in range(2):
        assert settled(passes) == ["", told]


def test_a_process_whose_store_has_ended_is_alone(passes: list[FailedPasses], monkeypatch: pytest.MonkeyPatch) -> None:
    def ended() -> None:
        raise dist.DistNetworkError("failed to send")

    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", ended)
    passes[1].note("a forward pass")
    told = f"rank 0 told of none within {failed_passes.WAIT_SECONDS:g} seconds, rank 1 met an error in a forward pass"
    assert settled(passes) == ["", told]
    topology = Topology(Mesh(), 0, torch.device("cpu"))
    single = FailedPasses(topology, "engine", OrderWatch(topology))  # one process need not ask
    single.note("a forward pass")
    single.settle()
