"""Parameters that a backward pass reads late have the last step's values, where the CPU works ahead of the step."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from gptpar.errors import GptparError
from gptpar.offload.events import EventLog, What
from tests.any_module.case import FREE, Case, Setup
from tests.any_module.cases import CASES
from tests.any_module.harness import Training
from tests.any_module.layouts import covering
from tests.any_module.matrix import Bench
from tests.any_module.oddities.late_reads import LATE_READS, DetachedFirstOnLastRank, DetachedInBlocks, HookReads
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
        training = Training(case, setup)
    back = []
    for step in range(STEPS):
        start = len(log.events)
        for micro in range(setup.accumulation):
            training.engine.backward(case.losses_of(training.engine, case.make_batch(step, micro, 0, 1))[0])
            if micro == setup.accumulation - 1:
                time.sleep(0.05)
                back.append(taken_back(log, start))
            training.engine.step()
    with training.engine.gathered():
        return Found(training.engine.host.num_ahead, back, copy_of_weights(training.model))


layouts = pytest.mark.parametrize("setup", [*ALONE, *TOGETHER], ids=lambda setup: str(setup).replace(", ", "-"))


@pytest.mark.parametrize(("case", "setup"), covering(LATE_READS, [*ALONE, *TOGETHER, *RELEASED]))
def test_reads_by_the_graph(bench: Bench, case: Case, setup: Setup) -> None:
    found = bench.on_ranks(setup.world, by_engine, case, setup)
    assert all(one.num_ahead > 0 for one in found), "the CPU never worked ahead, so that nothing was tested"
    assert_weights((one.weights for one in found), weights_of_a_loop(case, STEPS, setup.accumulation))


@layouts
@pytest.mark.parametrize("case", HOOKS, ids=lambda case: case.name)
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
    training = Training(HOOKS[0], setup)

    def backward(step: int) -> None:
        training.engine.backward(HOOKS[0].losses_of(training.engine, HOOKS[0].make_batch(step, 0, 0, 1))[0])

    with pytest.raises(GptparError) as caught:
        backward(0)
    for step in range(STEPS):
        with training.engine.gathered():
            backward(step)
        training.engine.step()
    with training.engine.gathered():
        return str(caught.value), copy_of_weights(training.model)


@pytest.mark.parametrize("setup", [Setup(2, 3, clip=FREE), *RELEASED], ids=str)
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
    training, steps = Training(case, setup), []
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
        training.engine.backward(training.case.losses_of(training.engine, case.make_batch(step, 0, 0, 1))[0])
        training.engine.step()
    with training.engine.gathered():
        return steps, copy_of_weights(training.model)


@pytest.mark.parametrize(
    ("case", "setup"),
    [*((ON_ONE, one) for one in TOGETHER), (ON_ALL, RELEASED[0])],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
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

    def note(block: nn.Module, args: Any) -> None:
        found[names[block]] = block.up.weight.detach().clone()  # type: ignore[union-attr]

    names = {block: f"blocks.{name}.up.weight" for name, block in training.model.blocks.named_children()}
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
        training.engine.backward(training.case.losses_of(training.engine, training.make_batch(0, 0))[0])
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
        with training.engine.gathered():
            before = copy_of_weights(training.model)
        training.engine.backward(training.case.losses_of(training.engine, training.make_batch(step, 0))[0])
        time.sleep(0.05)
        wrong += [name for name, value in read(training).items() if not torch.equal(value, before[name])]
        back.append(taken_back(log, start))
        training.engine.step()
    training.engine.backward(training.case.losses_of(training.engine, training.make_batch(3, 0))[0])
    time.sleep(0.05)
    training.engine.step()
    training.engine.engine.finish()
    return wrong, back, training.engine.host.num_ahead


SETUPS = [Setup(1, 0, 1.0, clip=FREE), Setup(1, 2, 0.6, clip=FREE)]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: str(setup).replace(", ", "-"))
@pytest.mark.parametrize("read", [whole, plainly, forward_of_the_module, backward_in_gathered])
def test_states_before_the_step(bench: Bench, setup: Setup, read: Any) -> None:
    ((wrong, back, num_ahead),) = bench.on_ranks(setup.world, states, setup, read)
    assert wrong == [] and num_ahead > 0
    # After gathered() nothing is taken back, because nothing begins before the step.
    assert [{"blocks.1", "blocks.2"} <= units for units in back] == [read is not backward_in_gathered] * 3


def loads_before_the_step(rank: int, setup: Setup) -> tuple[Named, list[set[str]]]:
    """(weights loaded between backward and step, which the step then changes; each step's units taken back)"""
    with logged() as log:
        training, back = Training(Case("plain", Linear), setup), []
    for step in range(3):
        start = len(log.events)
        training.engine.backward(training.case.losses_of(training.engine, training.case.make_batch(step, 0, 0, 1))[0])
        time.sleep(0.05)
        if step == 1:
            training.model.load_state_dict(other_weights())
        back.append(taken_back(log, start))
        training.engine.step()
    with training.engine.gathered():
        return copy_of_weights(training.model), back


class Linear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(16, 16)


def other_weights() -> Named:
    return Case("plain", Linear).make_model(seed=7).state_dict()


@pytest.mark.parametrize("setup", [Setup(1, 0, 0.0, clip=FREE), *SETUPS, *TOGETHER], ids=str)
def test_weights_loaded_before_the_step(bench: Bench, setup: Setup) -> None:

    def load(model: nn.Module, step: int) -> None:
        if step == 1:
            model.load_state_dict(other_weights())

    found = bench.on_ranks(setup.world, loads_before_the_step, setup)
    for _, back in found:
        assert [bool(units) for units in back] == [False, setup.ratio > 0, False]
    wanted = weights_of_a_loop(Case("plain", Linear), 3, before_step=load)
    assert_weights((weights for weights, _ in found), wanted)
