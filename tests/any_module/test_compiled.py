"""Compiled blocks give the numbers of plain torch: hooks, recomputation and parameters that come and go included."""

from collections.abc import Iterator

import pytest

from tests.any_module.case import Setup
from tests.any_module.compiling import CompiledTraining
from tests.any_module.matrix import Bench

ALONE, TWO = Setup(1, 0, 0.6, steps=5), Setup(2, 3, 0.6, accumulation=2, steps=5)


@pytest.fixture(scope="module")
def compiled() -> Iterator[Bench]:
    with Bench(timeout_s=120.0) as bench:
        yield bench


WAYS = ["key_eager", "key_aot", "default_aot", "before_aot", "after_aot"]
NAMES = [
    *("gpt2_checkpointed", "recomputation_inside", "block_called_under_checkpoint"),
    *("block_called_under_checkpoint_reentrant", "dictionaries", "users_hooks", "side_outputs"),
]
CASES = [("mlp", "default_aot", ALONE), *((name, WAYS[number % 5], TWO) for number, name in enumerate(NAMES))]


@pytest.mark.parametrize(("name", "way", "setup"), CASES, ids=lambda value: str(value).replace(", ", "-"))
def test_compiled_blocks_are_plain_torchs(compiled: Bench, way: str, name: str, setup: Setup) -> None:
    compiled.engine = f"tests.any_module.compiling:{way}"
    compiled.check(name, setup, CompiledTraining)
