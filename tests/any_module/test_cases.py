"""Losses, gradients, norms, weights and buffers of each step of all cases against plain torch, to 1e-10.

A covering subset; ``python -m tests.any_module --full`` runs all of it: 1, 2 and 4 processes x ZeRO 0-3 x CPU share.
"""

from dataclasses import replace
from typing import Any

import pytest

from tests.any_module.case import Setup
from tests.any_module.compare import problems
from tests.any_module.harness import worst_of_ranks
from tests.any_module.layouts import covering, fitting, named
from tests.any_module.matrix import Bench
from tests.any_module.oddities import ODDITIES
from tests.any_module.scenarios import SCENARIOS

STEPS = 4

# Models.

EVERY_STAGE_AND_SHARE = [
    Setup(2, stage, ratio, accumulation=1 + 2 * (stage % 2), clip=0.0 if stage == 2 else 0.5)
    for stage in range(4)
    for ratio in (0.0, 0.6, 1.0)
]
MODELS = [Setup(1, 3, 0.6, accumulation=3), Setup(2, 3, 1.0), Setup(2, 2, 0.6, clip=0.0)]
SYNCHRONISED = [Setup(1, 0, 0.6), Setup(2, 3, 0.6, accumulation=3), Setup(2, 1, 0.0)]
ZOO = [
    *(("mlp", setup) for setup in EVERY_STAGE_AND_SHARE),
    *((name, setup) for name in ("gpt2", "llama") for setup in MODELS),
    *(("gpt2_checkpointed", Setup(2, 3, 0.0, accumulation=3)), ("llama_checkpointed_reentrant", Setup(1, 3, 0.6))),
    *((name, setup) for name in ("cnn", "cnn_channels_last") for setup in SYNCHRONISED),
    *(("gpt2", Setup(4, 3, 0.6)), ("cnn", Setup(4, 3, 1.0)), ("mlp", Setup(4, 0, 0.6))),
]


@pytest.mark.parametrize(("name", "setup"), ZOO, ids=named)
def test_model(bench: Bench, name: str, setup: Setup) -> None:
    bench.check(name, replace(setup, steps=STEPS))


# Oddities and scenarios on two processes with all of ZeRO, and every second one in one of three other layouts.

SETUPS = [
    Setup(1, 0, 0.6, steps=STEPS),
    Setup(1, 3, 0.0, accumulation=3, clip=0.0, steps=STEPS),
    Setup(2, 0, 0.0, accumulation=2, steps=STEPS),
    Setup(2, 3, 0.6, steps=STEPS),
]
TWO_MICRO_BATCHES = [Setup(1, 0, 0.0, 2, steps=STEPS), Setup(1, 3, 0.6, steps=STEPS), Setup(2, 2, 0.0, 2, steps=STEPS)]
TWO_MICRO_BATCHES += [Setup(2, 3, 0.6, 2, steps=STEPS)]


@pytest.mark.parametrize(("name", "setup"), covering(ODDITIES, SETUPS))
def test_oddity(bench: Bench, name: str, setup: Setup) -> None:
    bench.check(name, setup)


@pytest.mark.parametrize(
    ("name", "setup"), covering([name for name, case in SCENARIOS.items() if not case.resumed], TWO_MICRO_BATCHES)
)
def test_scenario(bench: Bench, name: str, setup: Setup) -> None:
    bench.check(name, fitting(SCENARIOS[name], setup))


# Saved at one stage and size, resumed at another: the numbers of a training that was never interrupted.

# (saved by, loaded by): world x accumulation stays the same, so that a step has the same micro-batches.
ALONE, ALONE_SHARDED = Setup(1, 0, 0.0, 4, steps=STEPS), Setup(1, 3, 0.6, 4, steps=STEPS)
PAIRS = [
    (ALONE, ALONE_SHARDED),
    (ALONE, Setup(2, 3, 0.6, 2, steps=STEPS)),
    (Setup(2, 3, 0.6, 2, steps=STEPS), ALONE),
    (Setup(2, 2, 1.0, 2, steps=STEPS), Setup(4, 3, 0.0, 1, steps=STEPS)),
    (Setup(4, 3, 0.0, 1, steps=STEPS), Setup(2, 1, 0.6, 2, steps=STEPS)),
]
STATISTICS = (Setup(2, 3, 0.6, 2, steps=STEPS), Setup(2, 1, 0.0, 2, steps=STEPS))
"""What the first process has of BatchNorm is saved."""
INTERRUPTED = [
    *zip(("mlp", "gpt2", "tied_weights", "mlp", "tied_weights"), PAIRS, strict=True),
    *((name, PAIRS[1]) for name in ("tied_blocks", "parameter_groups_across_blocks", "frozen_in_turns")),
    *((name, PAIRS[2]) for name in ("frozen_block", "clients_schedule", "unfrozen_gradually")),
    *((name, STATISTICS) for name in ("cnn", "cnn_channels_last")),
]


def resumed(pair: tuple[Setup, Setup]) -> Setup:
    """Saved by the first layout in the middle, resumed by the second."""
    return replace(pair[1], saved_by=pair[0])


def _id(value: Any) -> str:
    return value if isinstance(value, str) else " to ".join(map(named, value))


@pytest.mark.parametrize(("name", "pair"), INTERRUPTED, ids=_id)
def test_resumed_elsewhere(bench: Bench, name: str, pair: tuple[Setup, Setup]) -> None:
    bench.check(name, resumed(pair))


@pytest.mark.parametrize("name", ["mixed_fp64_fp32", "mixed_bf16_fp32", "odd_parameters", "frozen_beginning"])
def test_oddities_go_on_as_if_uninterrupted(bench: Bench, name: str) -> None:
    """Narrow formats deviate from plain torch, and not from the engine itself."""
    traces = bench.train(name, resumed(PAIRS[0]))
    assert not problems(worst_of_ranks(traces, bench.train(name, ALONE)[0]), 1e-10)
