"""A pass that ended in an error has to have ended so on all processes."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gptpar.adapter.guards import failed_passes
from gptpar.adapter.guards.failed_passes import FailedPasses
from gptpar.adapter.guards.order_watch import OrderWatch
from gptpar.errors import GptparError
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh

TOLD = "an error ended a pass, but not the same pass on all processes: "
REMEDY = ". The others wait in theirs, so that the run cannot go on: let the error end the process, and start again "


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[FailedPasses]:
    """Those of two processes, here threads, with one store."""
    store = dist.HashStore()
    monkeypatch.setattr(failed_passes.dist.distributed_c10d, "_get_default_store", lambda: store)
    made = []
    for rank in range(2):
        topology = Topology(Mesh(data=2), rank, torch.device("cpu"))
        made.append(FailedPasses(topology, "engine", OrderWatch(topology)))
    return made


def settled(two: list[FailedPasses]) -> list[str]:
    """What each says, all at once, but for the last words."""

    def said(one: FailedPasses) -> str:
        try:
            one.settle()
        except GptparError as error:
            return str(error).removesuffix("from a checkpoint.")
        return ""

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(said, two))


def test_what_failed_on_all_is_forgotten_again_and_again(two: list[FailedPasses]) -> None:
    assert settled(two) == ["", ""]
    for place in ("a forward pass of step 1", "a backward pass of step 1", "a forward pass of step 1"):
        for one in two:
            one.note(place)
            one.note("what failed because of it")
        assert settled(two) == ["", ""]


def test_other_passes_are_told_on_all(two: list[FailedPasses]) -> None:
    two[0].note("a forward pass")
    two[1].note("a backward pass")
    told = "rank 0 met an error in a forward pass, rank 1 met an error in a backward pass"
    assert settled(two) == [TOLD + told + REMEDY] * 2


def test_a_process_that_is_alone_does_not_go_on(two: list[FailedPasses], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_passes, "WAIT_SECONDS", 0.1)
    two[1].note("a forward pass")
    told = "rank 0 told of none within 0.1 seconds, rank 1 met an error in a forward pass"
    for _ in range(2):
        assert settled(two) == ["", TOLD + told + REMEDY]


def test_a_process_whose_store_has_ended_is_alone(two: list[FailedPasses], monkeypatch: pytest.MonkeyPatch) -> None:
    def ended() -> Any:
        raise dist.DistNetworkError("failed to send")

    monkeypatch.setattr(failed_passes.dist.distributed_c10d, "_get_default_store", ended)
    two[1].note("a forward pass")
    told = f"rank 0 told of none within {failed_passes.WAIT_SECONDS:g} seconds, rank 1 met an error in a forward pass"
    assert settled(two) == ["", TOLD + told + REMEDY]


def test_one_process_need_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_store() -> Any:
        raise AssertionError("there is none")

    monkeypatch.setattr(failed_passes.dist.distributed_c10d, "_get_default_store", no_store)
    topology = Topology(Mesh(), 0, torch.device("cpu"))
    alone = FailedPasses(topology, "engine", OrderWatch(topology))
    alone.note("a forward pass")
    alone.settle()
