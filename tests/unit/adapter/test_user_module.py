"""``--module``: what a user hands over, and what is said of mistakes."""

import re
import sys
from pathlib import Path

import pytest
import torch

from gptpar.adapter.user_module import load_user_function
from gptpar.cli.check_layouts.module_training import ModuleCheck
from gptpar.errors import GptparError

FILE = Path(__file__).parents[2] / "fixtures/user_modules.py"
CPU = torch.device("cpu")


def check(name: str) -> ModuleCheck:
    return ModuleCheck(load_user_function(f"{FILE}:{name}"), "fp64", 1, 1)


def test_each_call_makes_equal_values_and_batches_depend_on_their_number_alone():
    first = load_user_function(f"{FILE}:mlp")()
    second = load_user_function("tests.fixtures.user_modules:mlp")()
    for one, other in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(one, other) and one is not other
    batch, _ = first.batch(3, CPU, torch.float64)
    first.batch(4, CPU)
    assert batch.dtype == torch.float64 and torch.equal(batch, first.batch(3, CPU)[0].double())
    assert not torch.equal(batch, first.batch(4, CPU, torch.float64)[0])


def test_the_loss_may_be_the_output_or_a_function_of_it():
    own, given = load_user_function(f"{FILE}:mlp")(), load_user_function(f"{FILE}:with_loss_fn")()
    x = torch.randn(4, 6)
    assert torch.equal(own.loss(own.module, (x, x)), given.loss(given.module, x))


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("nowhere.py:make", "there is no file nowhere.py"),
        ("no.such.package:make", "No module named 'no'"),
        ("make", "name a function as FILE.py:FUNCTION"),
        (f"{FILE}:mpl", "has no function mpl (did you mean mlp?)"),
    ],
)
def test_a_function_that_is_not_there_is_told(spec, told):
    with pytest.raises(GptparError, match=re.escape(told)):
        load_user_function(spec)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fails", "fails() failed: KeyError: 'vocabulary' (user_modules.py, line "),
        ("returns_a_number", "returned (int): it has to return model, make_batch or"),
        ("model_alone", "returns a model alone: here it has to return model, make_batch"),
        ("batch_fails", "make_batch(0) failed: IndexError: pop from empty list (user_modules.py, line "),
        ("no_scalar", "the model gave a tensor of shape (4, 6), not a scalar loss"),
        ("dropout", "the model draws random numbers in its forward pass (1)"),
    ],
)
def test_what_cannot_be_compared_is_told(name, told):
    check("mlp").require_repeatable(CPU)
    with pytest.raises(GptparError, match=re.escape(told)):
        check(name).require_repeatable(CPU)


def test_a_file_that_fails_is_told_with_its_line_and_imported_anew(tmp_path):
    path, before = tmp_path / "broken_file.py", list(sys.path)
    path.write_text("def make():\n    return helper()\n\nimport not_there\n")
    told = r"failed: ModuleNotFoundError: No module named 'not_there' \(broken_file.py, line 4\)"
    for _ in range(2):
        with pytest.raises(GptparError, match=told):
            load_user_function(f"{path}:make")
    assert sys.path == before and path.stem not in sys.modules


NAMED_AS_A_LOADED_MODULE = """
from __future__ import annotations
from dataclasses import dataclass, fields
from typing import ClassVar as CV
import sys
import torch

@dataclass
class Sizes:
    known: CV[int] = 2
    width: int = 3

def make():
    assert len(fields(Sizes)) == 1 and sys.modules[__name__].make is make
    return torch.nn.Linear(Sizes().width, Sizes.known)
"""


def test_a_file_with_the_name_of_a_loaded_module_is_a_module_of_its_own(tmp_path):
    path = tmp_path / "random.py"
    path.write_text(NAMED_AS_A_LOADED_MODULE)
    assert tuple(load_user_function(f"{path}:make")().module.weight.shape) == (2, 3)
    found = sys.modules[str(path)]
    load_user_function(f"{path}:make")
    assert sys.modules[str(path)] is found and "randint" in vars(sys.modules["random"])
