"""Processes that wait for each other, because they have not made the same calls, say so."""

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from gptpar.adapter.guards import order_watch
from gptpar.adapter.guards.agreement import REMEDY
from gptpar.adapter.guards.order_watch import ALL_CALL, OrderWatch
from gptpar.errors import GptparError
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import Mesh

BACKWARD, OPTIMIZER = "a backward pass", "the optimizer's step"


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OrderWatch]]:
    """Those of two processes, here threads, with one store."""
    store = dist.HashStore()
    monkeypatch.setattr(order_watch.dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(order_watch, "LOOK_SECONDS_WITHOUT_UNITS", 0.02)
    made = [OrderWatch(Topology(Mesh(data=2), rank, torch.device("cpu"))) for rank in range(2)]
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
def test_a_wait_that_cannot_end_is_an_error_that_names_both_calls(
    two: list[OrderWatch], mine: list[str], others: list[str], told: str
) -> None:
    for one, places in zip(two, (mine, others), strict=True):
        for place in places:
            one.note(place)
    with pytest.raises(GptparError) as raised:
        two[0].wait_for(Endless())
    assert str(raised.value) == (
        f"processes wait for each other in step 3, because they have made different calls: after {len(mine) - 1} equal "
        f"calls, rank 0 is at {told}. The run cannot go on: end it. {REMEDY if 'unit' in told else ALL_CALL}"
    )


def test_a_process_that_has_closed_its_engine_is_known_to_the_others(two: list[OrderWatch]) -> None:
    two[1].note(BACKWARD)
    two[0].close()
    with pytest.raises(GptparError, match=r"rank 0 is at engine\.close\(\), rank 1 is at a backward pass"):
        two[1].wait_for(Endless())


def test_the_loss_of_a_process_that_found_the_difference_is_told_as_the_difference(two: list[OrderWatch]) -> None:
    two[1].note(BACKWARD)
    two[1]._publish()
    with pytest.raises(GptparError, match="rank 0 is at engine"), two[0].together("save_checkpoint"):
        raise RuntimeError("Connection closed by peer")


def test_a_process_that_is_only_behind_is_told_once(
    two: list[OrderWatch], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(order_watch, "TELL_SECONDS", 0.1)
    two[1].note(BACKWARD)
    told = threading.Event()
    monkeypatch.setattr(two[1], "_tell", lambda found, tell=two[1]._tell: (tell(found), told.set()))
    assert told.wait(10)
    told.clear()
    assert not told.wait(0.2) and two[1].error is None
    line = capfd.readouterr().err
    assert line.startswith(
        "gptpar: rank 1 has waited 0.1 seconds at a backward pass of step 3: rank 0 was last seen be"
    )
    assert line.count("\n") == 1
