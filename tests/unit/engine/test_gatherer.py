"""Parameters that come from host memory stay from a backward pass to the next forward pass, as far as they fit."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from gptpar.engine.parameter_memory import ParameterMemory
from tests.helpers import make_trainer, tiny_config
from tests.unit.engine.tiny_steps import forward_backward, update, weights_of

STEPS = (3, 1, 2)
"""Micro-batches of each step."""
UNITS = 6  # embedding, positions, three blocks, final norm


@contextmanager
def noting_of(note: Callable[[str], object]) -> Iterator[None]:
    """Tells of each unit that gets memory on the device."""
    allocate = ParameterMemory.allocate

    def noted(memory: ParameterMemory, unit: str) -> torch.Tensor:
        note(unit)
        return allocate(memory, unit)

    with mock.patch.object(ParameterMemory, "allocate", noted):
        yield


def trained(flags: str) -> tuple[list[int], list[dict[str, torch.Tensor]]]:
    """Of each step: how many units came to the device, and the master weights after it."""
    trainer = make_trainer(tiny_config(f"--global-batch-size 6 --num-layers 3 --clip-grad 0.5 --fp64 {flags}"))
    came, weights, units = [], [], list[str]()
    with noting_of(units.append):
        for number, count in enumerate(STEPS):
            units.clear()
            loss = forward_backward(trainer, number, count)
            came.append(len(units))
            update(trainer, loss, number, count)
            weights.append(weights_of(trainer))
    trainer.close()
    return came, weights


@pytest.mark.parametrize(
    "flags",
    ["", pytest.param("--untie-embeddings-and-output-weights --recompute-granularity full", marks=pytest.mark.slow)],
)
def test_what_stays_comes_once_a_micro_batch(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as there is room; the weights after each step are those of parameters that never leave, bit for bit.

    A forward pass brings all units, a backward pass all but the last layer's. Where that one is the first layer, too,
    the final norm is prefetched before it at the end of the step. Where it is not, no backward pass brings the
    embedding for itself.
    """
    offload = "--no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio 0.6 --cpu-parameters"
    _, plain = trained(flags)
    came = {}
    rooms = {"for all": itertools.repeat(0), "for none": itertools.count(), "for some": itertools.cycle([0, 0, 1])}
    for room, bytes_in_use in rooms.items():
        monkeypatch.setattr(ParameterMemory, "in_use", lambda self, numbers=bytes_in_use: next(numbers))
        came[room], weights = trained(f"{flags} {offload}")
        for one, other in zip(weights, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    tied = not flags
    forward, backward = UNITS + (not tied), UNITS - 1
    assert came["for all"] == [forward + count * backward + (tied or count - 1) for count in STEPS]
    assert came["for none"] == [count * (forward + backward) + tied for count in STEPS]
    assert forward + 3 * backward + tied < came["for some"][0] < 3 * (forward + backward) + tied


def test_layers_ahead_are_brought_before_a_large_one_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The LM head has the bytes of several blocks. In a step's first forward pass the host waits one layer ahead."""
    flags = "--untie-embeddings-and-output-weights --num-layers 4"
    offload = "--no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio 1 --cpu-parameters"
    config = tiny_config(f"--global-batch-size 4 --fp64 {flags} {offload}")
    trainer = make_trainer(config.update("model", padded_vocab_size=4096))
    events, in_use = list[tuple[str, str]](), itertools.count()
    monkeypatch.setattr(ParameterMemory, "in_use", lambda self: next(in_use))  # nothing stays
    trainer.engine.gatherer.on_call = lambda name: events.append(("called", name))
    with noting_of(lambda unit: events.append(("brought", unit))):
        for number in range(2):
            events.clear()
            update(trainer, forward_backward(trainer, number, 2), number, 2)
    trainer.close()
    names = [name for event, name in events if event == "called"][:8]
    ends = [index for index, event in enumerate(events) if event == ("called", names[-1])]
    first, second = ([called_with(events, end, name) for name in names[1:]] for end in ends)
    assert first == names[:-1]
    assert second == ["embedding"] * 7  # all other layers together are smaller than the LM head


def called_with(events: list[tuple[str, str]], end: int, name: str) -> str:
    """The layer whose call brought another one, in the forward pass that ends at an event."""
    brought = max(index for index in range(end) if events[index] == ("brought", name))
    return next(layer for event, layer in events[brought:] if event == "called")
