"""Parameters that a backward pass reads late have the last step's values, where the CPU works ahead of the step."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gptpar.offload.events import EventLog, What
from tests.any_module.case import FREE, Case, Setup
from tests.any_module.cases import CASES
from tests.any_module.harness import Alike, Training
from tests.any_module.layouts import covering, each_of, named
from tests.any_module.matrix import Bench
from tests.any_module.oddities.late_reads import LATE_READS, DetachedFirstOnLastRank, DetachedInBlocks, HookReads
from tests.any_module.on_rank import said
from tests.any_module.reference import Named, assert_weights, copy_of_weights, weights_of_a_loop
from tests.offload_log import logged

STEPS = 5
ALONE = [Setup(1, 0, 1.0, clip=FREE), Setup(1, 3, 0.6, accumulation=2, clip=FREE)]
TOGETHER = [Setup(2, 0, 1.0, clip=FREE), Setup(2, 2, 0.6, clip=FREE)]
RELEASED = [Setup(2, 3, 1.0, clip=FREE)]
HOOKS = [Case("hook", HookReads), Case("hook_later", partial(HookReads, 4))]
"""The second one's hook comes when the first passes have been observed."""


@dataclass(frozen=True)
class Found:
    """What a rank has after training.

    Attributes:
        num_ahead: elements updated ahead of a step.
        taken_back: for each step the units that the CPU had begun to update ahead, and restored for a reader.
    """

    num_ahead: int
    taken_back: list[set[str]]
    weights: Named


def taken_back(log: EventLog, start: int = 0) -> set[str]:
    """The units whose update ahead of the step was undone, from a place of the log on."""
    return {event.unit for event in log.events[start:] if event.what == What.TAKEN_BACK}


def by_engine(rank: int, case: Case, setup: Setup) -> Found:
    with logged() as log:
        training = Alike(case, setup)
    back = []
    for step in range(STEPS):
        start = len(log.events)
        for micro in range(setup.accumulation):
            training.engine.backward(training.loss_of(step, micro))
            if micro == setup.accumulation - 1:
                time.sleep(0.05)
                back.append(taken_back(log, start))
            training.engine.step()
    return Found(training.engine.host.num_ahead, back, training.weights())


@pytest.mark.parametrize(("case", "setup"), covering(LATE_READS, [*ALONE, *TOGETHER, *RELEASED]))
def test_reads_by_the_graph(bench: Bench, case: Case, setup: Setup) -> None:
    found = bench.on_ranks(setup.world, by_engine, case, setup)
    assert all(one.num_ahead > 0 for one in found), "the CPU never worked ahead, so that nothing was tested"
    assert_weights((one.weights for one in found), weights_of_a_loop(case, STEPS, setup.accumulation))


@each_of([*ALONE, *TOGETHER])
@pytest.mark.parametrize("case", HOOKS, ids=named)
def test_reads_by_a_hook(bench: Bench, case: Case, setup: Setup) -> None:
    found = bench.on_ranks(setup.world, by_engine, case, setup)
    first = case.make_model().from_call // setup.accumulation
    # The first micro-batch shows reads, and the unit waits for the end of later passes. Reads that come later take the
    # CPU's work back in each step.
    reads = [step >= first if first else step == 0 and setup.accumulation == 1 for step in range(STEPS)]
    for one in found:
        assert ["blocks.2" in units for units in one.taken_back] == reads
        assert one.num_ahead > 0
    assert_weights((one.weights for one in found), weights_of_a_loop(case, STEPS, setup.accumulation))


def hook_of_released(rank: int, setup: Setup) -> tuple[str, Named]:
    """(what is said of a hook's read, the weights after steps whose backward passes are inside ``gathered``)"""
    training = Alike(HOOKS[0], setup)
    told = said(rank, lambda: training.engine.backward(training.loss_of(0)))
    for step in range(STEPS):
        with training.engine.gathered():
            training.engine.backward(training.loss_of(step))
        training.engine.step()
    return told, training.weights()


@each_of([Setup(2, 3, clip=FREE), *RELEASED])
def test_a_hook_reads_released_parameters_inside_gathered_alone(bench: Bench, setup: Setup) -> None:
    found = bench.on_ranks(setup.world, hook_of_released, setup)
    assert {told for told, _ in found} == {
        "blocks.2.up.weight was read outside of the model's forward, where its values are not on this process: they "
        "are spread over all processes, or on the host. Read and change parameters inside `with engine.gathered():`, "
        "which all processes enter."
    }
    assert_weights((weights for _, weights in found), weights_of_a_loop(HOOKS[0], STEPS, 1))


# Between processes.

ON_ALL = Case("on_all_ranks", DetachedInBlocks)
ON_ONE = Case("on_last_rank", partial(DetachedInBlocks, block=DetachedFirstOnLastRank))


def units_handed_on(rank: int, case: Case, setup: Setup) -> tuple[list[list[str]], Named]:
    """Train on a rank.

    Returns:
        For each step the names of the units in the order in which they were handed on, with "end" where the backward
        pass ended; and the final weights.
    """
    training, steps = Alike(case, setup), []
    gradients = training.engine.engine.gradients
    reduce, end = gradients.reducer.reduce, gradients.end_backward

    def note(unit: Any, *args: Any, **kwargs: Any) -> None:
        steps[-1].append(unit.name)
        reduce(unit, *args, **kwargs)

    def note_end() -> None:
        steps[-1].append("end")
        end()

    gradients.reducer.reduce, gradients.end_backward = note, note_end
    for step in range(STEPS):
        steps.append([])
        training.engine.backward(training.loss_of(step))
        training.engine.step()
    return steps, training.weights()


@pytest.mark.parametrize(
    ("case", "setup"),
    [*((ON_ONE, one) for one in TOGETHER), (ON_ALL, RELEASED[0])],
    ids=named,
)
def test_units_that_one_process_reads_late_are_the_last_on_all(bench: Bench, case: Case, setup: Setup) -> None:
    """Collectives match by their order alone; the other units are handed on before the pass has ended."""
    found = bench.on_ranks(setup.world, units_handed_on, case, setup)
    late = ["blocks.2", "blocks.1", "blocks.0"]
    for steps, _ in found:
        assert [name for name in steps[0] if name != "end"] == [*late, "(root)"]
        assert steps[1:] == [["(root)", "end", *late]] * (STEPS - 1)
    assert_weights((weights for _, weights in found), weights_of_a_loop(ON_ALL, STEPS, 1))


# Other reads before the step.


def whole(training: Training) -> Any:
    return training.model.state_dict()


def plainly(training: Training) -> Any:
    return copy_of_weights(training.model)


def forward_of_the_module(training: Training) -> Any:
    """What the model is called with: a hook of each block has its weights."""
    found: Named = {}
    names = {block: f"blocks.{name}.up.weight" for name, block in training.model.blocks.named_children()}

    def note(block: Any, args: Any) -> None:
        found[names[block]] = block.up.weight.detach().clone()

    hooks = [block.register_forward_pre_hook(note) for block in names]
    with torch.no_grad():
        training.case.losses_of(training.model, training.make_batch(99, 0))
    for hook in hooks:
        hook.remove()
    return found


def backward_in_gathered(training: Training) -> Any:
    """What is read after ``gathered``, inside of which the gradient became final."""
    training.engine.zero_grad()
    with training.engine.gathered():
        training.engine.backward(training.loss_of(0))
    time.sleep(0.05)
    return dict(training.model.named_parameters())


def states(rank: int, setup: Setup, read: Any) -> tuple[list[str], list[set[str]], int]:
    """Reads between backward and step in three steps.

    Returns:
        The names of parameters that differed from those after the last step; for each step the units whose early
        update was taken back; the number of elements updated early in a fourth step, which has no such reads.
    """
    with logged() as log:
        training, wrong, back = Training(CASES["mlp"], setup), [], []
    for step in range(3):
        start = len(log.events)
        before = training.weights()
        training.engine.backward(training.loss_of(step))
        time.sleep(0.05)
        wrong += [name for name, value in read(training).items() if not torch.equal(value, before[name])]
        back.append(taken_back(log, start))
        training.engine.step()
    training.engine.backward(training.loss_of(3))
    time.sleep(0.05)
    training.engine.step()
    training.engine.engine.finish()
    return wrong, back, training.engine.host.num_ahead


SETUPS = [Setup(1, 0, 1.0, clip=FREE), Setup(1, 2, 0.6, clip=FREE)]


@each_of(SETUPS)
@pytest.mark.parametrize("read", [whole, plainly, forward_of_the_module, backward_in_gathered])
def test_states_before_the_step(bench: Bench, setup: Setup, read: Any) -> None:
    ((wrong, back, num_ahead),) = bench.on_ranks(setup.world, states, setup, read)
    assert wrong == [] and num_ahead > 0
    # After gathered() nothing is taken back, because nothing begins before the step.
    assert [{"blocks.1", "blocks.2"} <= units for units in back] == [read is not backward_in_gathered] * 3


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)


PLAIN = Case("plain", Linear)


def load(model: nn.Module, step: int) -> None:
    """Other weights between backward and step, which the step then changes."""
    if step == 1:
        model.load_state_dict(PLAIN.make_model(seed=7).state_dict())


def loads_before_the_step(rank: int, setup: Setup) -> tuple[Named, list[set[str]]]:
    """(weights after three steps, each step's units taken back)"""
    with logged() as log:
        training, back = Alike(PLAIN, setup), []
    for step in range(3):
        start = len(log.events)
        training.engine.backward(training.loss_of(step))
        time.sleep(0.05)
        load(training.model, step)
        back.append(taken_back(log, start))
        training.engine.step()
    return training.weights(), back


@each_of([Setup(1, 0, 0.0, clip=FREE), *SETUPS, *TOGETHER])
def test_weights_loaded_before_the_step(bench: Bench, setup: Setup) -> None:
    found = bench.on_ranks(setup.world, loads_before_the_step, setup)
    for _, back in found:
        assert [bool(units) for units in back] == [False, setup.ratio > 0, False]
    assert_weights((weights for weights, _ in found), weights_of_a_loop(PLAIN, 3, before_step=load))
