"""Saved at one stage and size, resumed at another: the numbers of a training that was never interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.any_module.case import Setup
from tests.any_module.compare import Deviations, problems
from tests.any_module.harness import CASES, PLAIN, Training, worst_of_ranks
from tests.any_module.matrix import Bench
from tests.any_module.reference import Trace

STEPS, SAVED = 8, 4
CLIENT = {"epoch": 3, "words": ["any", None]}

# (saved by, loaded by): world x accumulation stays the same, so that a step has the same micro-batches.
ALONE, ALONE_SHARDED = Setup(1, 0, 0.0, 4, steps=STEPS), Setup(1, 3, 0.6, 4, steps=STEPS)
PAIRS = [
    (ALONE, ALONE_SHARDED),
    (ALONE, Setup(2, 3, 0.6, 2, steps=STEPS)),
    (Setup(2, 3, 0.6, 2, steps=STEPS), ALONE),
    (Setup(2, 2, 1.0, 2, steps=STEPS), Setup(4, 3, 0.0, 1, steps=STEPS)),
    (Setup(4, 3, 0.0, 1, steps=STEPS), Setup(2, 1, 0.6, 2, steps=STEPS)),
]
CASES_AND_PAIRS = [("gpt2", pair) for pair in PAIRS]
CASES_AND_PAIRS += [
    (name, pair)
    for name in ("tied_blocks", "frozen_block", "parameter_groups_across_blocks", "clients_schedule")
    for pair in PAIRS[1:3]
]


def save(rank: int, name: str, setup: Setup, engine: str, folder: str) -> None:
    """Train to the middle and save under two tags, the second after one step more."""
    training = Training(CASES[name], setup, engine)
    training.run(0, SAVED)
    training.engine.save_checkpoint(folder, tag="middle", client_state=CLIENT)
    training.run(SAVED, SAVED + 1)
    training.engine.save_checkpoint(folder, tag="later")
    training.engine.close()


def resume(rank: int, name: str, setup: Setup, engine: str, folder: str, tag: str | None = "middle") -> Trace:
    """Train from the middle to the end, from other initial weights."""
    training = Training(CASES[name], setup, engine, seed=7)
    path, state = training.engine.load_checkpoint(folder, **({} if tag is None else {"tag": tag}))
    assert path and (tag is None or state["epoch"] == CLIENT["epoch"]), (path, state)
    trace = training.run(SAVED if tag else SAVED + 1, setup.steps)
    training.engine.close()
    return trace


def resumed(bench: Bench, name: str, pair: tuple[Setup, Setup], folder: Path) -> Deviations:
    """What the second half deviates by; buffers of other batches are not compared."""
    before, after = pair
    bench.on_ranks(before.world, save, name, before, bench.engine, str(folder))
    traces = bench.on_ranks(after.world, resume, name, after, bench.engine, str(folder))
    wanted = bench.reference(name, after).since(SAVED)
    if before.world != after.world:
        traces = [replace(trace, buffers={}) for trace in traces]
        wanted = replace(wanted, buffers={})
    return worst_of_ranks(traces, wanted)


@pytest.mark.parametrize(("name", "pair"), CASES_AND_PAIRS, ids=lambda value: _id(value))
def test_resumed_elsewhere(bench: Bench, tmp_path: Path, name: str, pair: tuple[Setup, Setup]) -> None:
    bad = problems(resumed(bench, name, pair, tmp_path), 1e-10)
    assert not bad, bad


@pytest.mark.parametrize("pair", [(ALONE, ALONE_SHARDED), (ALONE_SHARDED, ALONE)], ids=["to ZeRO-3", "to ZeRO-0"])
def test_statistics_of_batches_are_saved(bench: Bench, tmp_path: Path, pair: tuple[Setup, Setup]) -> None:
    bad = problems(resumed(bench, "cnn", pair, tmp_path), 1e-10)
    assert not bad, bad


ODD = ["mixed_fp64_fp32", "mixed_bf16_fp32", "scalar_and_empty_parameters", "transposed_parameter", "channels_last"]


@pytest.mark.parametrize("name", [*ODD, "frozen_beginning"])
def test_oddities_go_on_as_if_uninterrupted(bench: Bench, tmp_path: Path, name: str) -> None:
    """Narrow formats deviate from plain torch, and not from the engine itself."""
    bench.on_ranks(1, save, name, ALONE, bench.engine, str(tmp_path))
    traces = bench.on_ranks(1, resume, name, ALONE_SHARDED, bench.engine, str(tmp_path))
    bad = problems(worst_of_ranks(traces, bench.train(name, ALONE)[0].since(SAVED)), 1e-10)
    assert not bad, bad


@pytest.mark.parametrize("name", ["cnn", "cnn_channels_last"])
def test_statistics_of_the_first_process_are_saved(bench: Bench, tmp_path: Path, name: str) -> None:
    pair = Setup(2, 3, 0.6, 2, steps=STEPS), Setup(2, 1, 0.0, 2, steps=STEPS)
    bad = problems(resumed(bench, name, pair, tmp_path), 1e-10)
    assert not bad, bad


@pytest.mark.parametrize("world", [1, 2])
def test_without_a_tag_the_newest_is_loaded(bench: Bench, tmp_path: Path, world: int) -> None:
    setup = Setup(world, 3, 0.6, steps=STEPS)
    bench.on_ranks(world, save, "mlp", setup, bench.engine, str(tmp_path))
    traces = bench.on_ranks(world, resume, "mlp", setup, bench.engine, str(tmp_path), None)
    bad = problems(worst_of_ranks(traces, bench.reference("mlp", setup).since(SAVED + 1)), 1e-10)
    assert not bad, bad


def _id(value: Any) -> str:
    return value if isinstance(value, str) else " to ".join(map(str, value)).replace(", ", "-")


def load_nothing(rank: int, setup: Setup, engine: str, folder: str) -> bool:
    """Whether the absence of a checkpoint is told, as DeepSpeed does by (None, {}), or by an error."""
    training = Training(CASES["mlp"], setup, engine)
    try:
        path, _ = training.engine.load_checkpoint(folder)
        told = path is None
    except Exception as error:
        told = folder in str(error)
    training.engine.close()
    return told


@pytest.mark.parametrize("world", [1, 2])
def test_an_empty_folder_is_told(bench: Bench, tmp_path: Path, world: int) -> None:
    assert all(bench.on_ranks(world, load_nothing, Setup(world, 3), bench.engine, str(tmp_path)))


def test_lost_moments_are_seen(tmp_path: Path) -> None:
    """The test itself: a checkpoint of weights alone does not pass."""
    with Bench(PLAIN) as plain:
        assert not problems(resumed(plain, "gpt2", (ALONE, ALONE), tmp_path), 1e-10)
        plain.engine = "mistake:moments_forgotten"
        found = resumed(plain, "gpt2", (ALONE, ALONE), tmp_path)
    assert found["gradient"].size > 1e-4 and found["weight"].size > 1e-4
    assert torch.isfinite(torch.tensor(found["loss"].size))
