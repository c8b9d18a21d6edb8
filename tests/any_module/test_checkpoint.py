"""Saved at one stage and size, resumed at another: the numbers of a training that was never interrupted."""

from dataclasses import replace
from typing import Any

import pytest

from tests.any_module.case import Setup
from tests.any_module.compare import problems
from tests.any_module.harness import worst_of_ranks
from tests.any_module.matrix import Bench

STEPS = 4

# (saved by, loaded by): world x accumulation stays the same, so that a step has the same micro-batches.
ALONE, ALONE_SHARDED = Setup(1, 0, 0.0, 4, steps=STEPS), Setup(1, 3, 0.6, 4, steps=STEPS)
PAIRS = [
    (ALONE, ALONE_SHARDED),
    (ALONE, Setup(2, 3, 0.6, 2, steps=STEPS)),
    (Setup(2, 3, 0.6, 2, steps=STEPS), ALONE),
    (Setup(2, 2, 1.0, 2, steps=STEPS), Setup(4, 3, 0.0, 1, steps=STEPS)),
    (Setup(4, 3, 0.0, 1, steps=STEPS), Setup(2, 1, 0.6, 2, steps=STEPS)),
]
INTERRUPTED = ("tied_blocks", "frozen_block", "parameter_groups_across_blocks", "clients_schedule")
INTERRUPTED += ("frozen_in_turns", "unfrozen_gradually")
CASES_AND_PAIRS = list(zip(("mlp", "gpt2", "tied_weights", "mlp", "tied_weights"), PAIRS, strict=True))
CASES_AND_PAIRS += [(name, PAIRS[1 + number % 2]) for number, name in enumerate(INTERRUPTED)]


def resumed(pair: tuple[Setup, Setup]) -> Setup:
    """Saved by the first layout in the middle, resumed by the second."""
    before, after = pair
    return replace(after, saved_by=before)


@pytest.mark.parametrize(("name", "pair"), CASES_AND_PAIRS, ids=lambda value: _id(value))
def test_resumed_elsewhere(bench: Bench, name: str, pair: tuple[Setup, Setup]) -> None:
    bench.check(name, resumed(pair))


ODD = ["mixed_fp64_fp32", "mixed_bf16_fp32", "scalar_and_empty_parameters", "transposed_parameter", "channels_last"]


@pytest.mark.parametrize("name", [*ODD, "frozen_beginning"])
def test_oddities_go_on_as_if_uninterrupted(bench: Bench, name: str) -> None:
    """Narrow formats deviate from plain torch, and not from the engine itself."""
    traces = bench.train(name, resumed((ALONE, ALONE_SHARDED)))
    bad = problems(worst_of_ranks(traces, bench.train(name, ALONE)[0]), 1e-10)
    assert not bad, bad


@pytest.mark.parametrize("name", ["cnn", "cnn_channels_last"])
def test_statistics_of_the_first_process_are_saved(bench: Bench, name: str) -> None:
    bench.check(name, resumed((Setup(2, 3, 0.6, 2, steps=STEPS), Setup(2, 1, 0.0, 2, steps=STEPS))))


def _id(value: Any) -> str:
    return value if isinstance(value, str) else " to ".join(map(str, value)).replace(", ", "-")
