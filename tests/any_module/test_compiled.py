"""Compiled blocks give the numbers of plain torch: hooks, recomputation and parameters that come and go included."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import gptpar
from gptpar.adapter import build, compiled_blocks
from gptpar.adapter.units import find_units
from tests.any_module.case import Setup
from tests.any_module.harness import Training
from tests.any_module.layouts import named
from tests.any_module.matrix import Bench
from tests.any_module.reference import Trace

ALONE, TWO = Setup(1, 0, 0.6, steps=6), Setup(2, 3, 0.6, accumulation=2, steps=6)
Initialize = Callable[..., Any]

# Ways to an engine whose blocks are compiled, by backends that need no compiler.


def by_key(backend: str, **given: Any) -> Any:
    """The configuration says so."""
    config = {**given.pop("config"), "gptpar": {"compile": True}}
    with patch.object(compiled_blocks, "compile_scopes", partial(compiled_blocks.compile_scopes, backend=backend)):
        return gptpar.initialize(config=config, **given)


def default_aot(**given: Any) -> Any:
    """The configuration says nothing, and blocks are compiled as on a GPU."""
    compiles = lambda stage, options, device: compiled_blocks.compile_shared(stage, "aot_eager")  # noqa: E731
    with patch.object(build, "compile_blocks", compiles):
        return gptpar.initialize(**given)


def before_aot(**given: Any) -> Any:
    """The user compiles what the engine takes for blocks."""
    compile_blocks(given["model"])
    return gptpar.initialize(**given)


def after_aot(**given: Any) -> Any:
    made = gptpar.initialize(**given)
    compile_blocks(given["model"])
    return made


def compile_blocks(model: nn.Module) -> None:
    """As :meth:`torch.nn.Module.compile` does it."""
    for scope in find_units(model).scopes:
        if scope.path:
            model.get_submodule(scope.path).compile(backend="aot_eager")


key_eager: Initialize = partial(by_key, "eager")
key_aot: Initialize = partial(by_key, "aot_eager")


class CompiledTraining(Training):
    """Sees that blocks were compiled, and not anew in each step."""

    def __init__(self, *given: Any):
        torch._dynamo.reset()
        counters.clear()
        super().__init__(*given)

    def run(self, start: int, stop: int) -> Trace:
        trace = super().run(start, stop)
        assert 1 <= counters["stats"]["unique_graphs"] < stop, counters["stats"]
        return trace


@pytest.fixture(scope="module")
def compiled() -> Iterator[Bench]:
    with Bench(timeout_s=120.0) as bench:
        yield bench


CASES = [
    ("mlp", "default_aot", ALONE),
    ("gpt2_checkpointed", "key_eager", TWO),
    ("recomputed", "key_aot", TWO),
    ("recomputed_reentrant", "before_aot", TWO),
    ("dataclasses", "after_aot", TWO),
    ("users_hooks", "key_eager", TWO),
    ("side_outputs", "default_aot", TWO),
]


@pytest.mark.parametrize(("name", "way", "setup"), CASES, ids=named)
def test_compiled_blocks_are_plain_torchs(compiled: Bench, way: str, name: str, setup: Setup) -> None:
    compiled.engine = f"tests.any_module.test_compiled:{way}"
    compiled.check(name, setup, CompiledTraining)
