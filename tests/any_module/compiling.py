"""Engines whose blocks are compiled, in four ways, by backends that need no compiler."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo.utils import counters

import gptpar
from gptpar.adapter import build, compiled_blocks
from gptpar.adapter.units import find_units
from tests.any_module.harness import Training
from tests.any_module.reference import Trace

Initialize = Callable[..., Any]


def by_key(backend: str, **given: Any) -> Any:
    """The configuration says so."""
    config = {**given.pop("config"), "gptpar": {"compile": True}}
    with patch.object(compiled_blocks, "compile_scopes", partial(compiled_blocks.compile_scopes, backend=backend)):
        return gptpar.initialize(config=config, **given)


def by_default(backend: str, **given: Any) -> Any:
    """The configuration says nothing, and blocks are compiled as on a GPU."""
    compiles = lambda stage, options, device: compiled_blocks.compile_shared(stage, backend)  # noqa: E731
    with patch.object(build, "compile_blocks", compiles):
        return gptpar.initialize(**given)


def by_user(backend: str, *, before: bool, **given: Any) -> Any:
    """The user compiles what the engine takes for blocks, before or after ``initialize``."""
    if before:
        compile_blocks(given["model"], backend)
    made = gptpar.initialize(**given)
    if not before:
        compile_blocks(given["model"], backend)
    return made


def compile_blocks(model: nn.Module, backend: str) -> None:
    """As :meth:`torch.nn.Module.compile` does it."""
    for scope in find_units(model).scopes:
        if scope.path:
            model.get_submodule(scope.path).compile(backend=backend)


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


key_eager: Initialize = partial(by_key, "eager")
key_aot: Initialize = partial(by_key, "aot_eager")
default_aot: Initialize = partial(by_default, "aot_eager")
before_aot: Initialize = partial(by_user, "aot_eager", before=True)
after_aot: Initialize = partial(by_user, "aot_eager", before=False)
