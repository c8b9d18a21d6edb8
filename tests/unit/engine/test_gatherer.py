"""Parameters that come from host memory stay from a backward pass to the next forward pass, as far as they fit."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from gptpar.data.loader import MicroBatch
from gptpar.engine.parameter_memory import ParameterMemory
from tests.helpers import make_trainer, random_tokens, tiny_config

STEPS = (3, 1, 2)
"""Micro-batches of each step."""
UNITS = 6  # embedding, positions, three blocks, final norm


def trained(flags: str) -> tuple[list[int], list[dict[str, torch.Tensor]]]:
    """Of each step: how many units came to the device, and the master weights after it."""
    trainer = make_trainer(tiny_config(f"--global-batch-size 6 --num-layers 3 --clip-grad 0.5 --fp64 {flags}"))
    came, weights = [], []
    with pytest.MonkeyPatch.context() as patch:
        allocate, units = ParameterMemory.allocate, list[str]()
        patch.setattr(ParameterMemory, "allocate", lambda self, unit: (units.append(unit), allocate(self, unit))[1])
        for number, count in enumerate(STEPS):
            units.clear()
            parts = random_tokens(2 * count, 16, 60, seed=number).split(2)
            loss = trainer.forward_backward([MicroBatch(one[:, :-1], one[:, 1:]) for one in parts], number)
            came.append(len(units))
            trainer.update(loss, iteration=number + 1, samples=2 * count, progress=2 * number + 2, stop=False)
            trainer.engine.finish()
            found = trainer.engine.optimizer.state_tensors()["weights"].items()
            weights.append({name: torch.cat([part.flatten() for _, part in one.parts]) for name, one in found})
    trainer.close()
    return came, weights


def bytes_in_use(room: str) -> Iterator[int]:
    """What a device's memory says, each time it is asked."""
    if room == "for all":
        return itertools.repeat(0)
    if room == "for none":
        return itertools.count()
    return itertools.cycle([0, 0, 1])


@pytest.mark.parametrize("flags", ["", "--untie-embeddings-and-output-weights --recompute-granularity full"])
@pytest.mark.parametrize("room", ["for all", "for none", "for some"])
def test_what_stays_comes_once_a_micro_batch(room: str, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = bytes_in_use(room)
    monkeypatch.setattr(ParameterMemory, "in_use", lambda self: next(numbers))
    offload = "--no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio 0.6 --cpu-parameters"
    came, weights = trained(f"{flags} {offload}")
    _, plain = trained(flags)
    for one, other in zip(weights, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    # A forward pass brings all units, a backward pass all but the last layer's. Where that one is the first layer, too,
    # the final norm is prefetched before it at the end of the step. Where it is not, no backward pass brings the
    # embedding for itself.
    tied = not flags
    forward, backward = UNITS + (not tied), UNITS - 1
    if room == "for all":
        assert came == [forward + count * backward + (tied or count - 1) for count in STEPS]
    elif room == "for none":
        assert came == [count * (forward + backward) + tied for count in STEPS]
    else:
        assert forward + 3 * backward + tied < came[0] < 3 * (forward + backward) + tied


def test_layers_ahead_are_brought_before_a_large_one_and_never_waited_for() -> None:
    """The LM head has the bytes of several blocks. In a step's first forward pass the host waits one layer ahead."""
    flags = "--untie-embeddings-and-output-weights --num-layers 4"
    offload = "--no-pipeline-parallel --cpu-optimizer --cpu-optimizer-ratio 1 --cpu-parameters"
    config = tiny_config(f"--global-batch-size 4 --fp64 {flags} {offload}")
    trainer = make_trainer(config.update("model", padded_vocab_size=4096))
    events = list[tuple[str, str]]()
    with pytest.MonkeyPatch.context() as patch:
        allocate, in_use = ParameterMemory.allocate, itertools.count()
        patch.setattr(ParameterMemory, "in_use", lambda self: next(in_use))  # nothing stays
        patch.setattr(
            ParameterMemory, "allocate", lambda self, unit: (events.append(("brought", unit)), allocate(self, unit))[1]
        )
        trainer.engine.gatherer.on_call = lambda name: events.append(("called", name))
        for number in range(2):
            events.clear()
            parts = random_tokens(4, 16, 60, seed=number).split(2)
            loss = trainer.forward_backward([MicroBatch(one[:, :-1], one[:, 1:]) for one in parts], number)
            trainer.update(loss, iteration=number + 1, samples=4, progress=4 * number + 4, stop=False)
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
