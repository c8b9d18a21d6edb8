"""A user's module trains as in plain PyTorch, and one that does not is found out."""

from math import inf

import pytest
import torch
from torch.nn import functional as F

from gptpar.adapter.user_module import load_user_function
from gptpar.cli.check_layouts.compare import difference, overall_difference, step_difference
from gptpar.cli.check_layouts.module_training import ModuleCheck, train_case, train_plainly
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.plan.space.candidate import Option
from gptpar.plan.space.spaces import to_prove_of_a_module
from tests.spawn import spawn

TOLERANCE, STEPS = 1e-12, 3
EVERY_CASE = list(to_prove_of_a_module(2))
CASES = {case.name: case for case in EVERY_CASE}
"""Each ZeRO stage with each kind of offload."""


def check(name: str, processes: int, number_format: str = "fp64") -> ModuleCheck:
    return ModuleCheck(load_user_function(f"tests.fixtures.user_modules:{name}"), number_format, processes, STEPS)


def train_all(rank: int) -> dict[str, Outcome]:
    """Every case of the module, and one of another whose loss depends on the rank."""
    found = {name: train_case(check("mlp", 2), case) for name, case in CASES.items()}
    return found | {"wrong": train_case(check("depends_on_rank", 2), CASES["2 processes, ZeRO-2"])}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return spawn(train_all, 2)[0]


@pytest.fixture(scope="module")
def reference() -> Outcome:
    return train_plainly(check("mlp", 2), torch.device("cpu"))


def worst(found: Outcome, wanted: Outcome) -> float:
    assert len(found.steps) == len(found.gradients) == len(found.weights) == STEPS
    return max(
        difference([(found.initial, wanted.initial)]),
        step_difference(found.steps, wanted.steps),
        difference(zip(found.gradients, wanted.gradients, strict=True)),
        difference(zip(found.weights, wanted.weights, strict=True)),
    )


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_plain_pytorch(outcomes, reference, name):
    assert worst(outcomes[name], reference) <= TOLERANCE


def test_what_depends_on_the_rank_is_found_out(outcomes, reference):
    assert 1e-8 < worst(outcomes["wrong"], reference) < 1e-4


@pytest.mark.parametrize("case", list(to_prove_of_a_module(1)), ids=lambda case: case.name)
def test_one_process_is_plain_pytorch(case: Option):
    wanted = train_plainly(check("with_loss_fn", 1), torch.device("cpu"))
    assert worst(train_case(check("with_loss_fn", 1), case), wanted) <= TOLERANCE


def test_one_process_in_bf16():
    wanted = train_plainly(check("mlp", 1, "bf16"), torch.device("cpu"))
    found = train_case(check("mlp", 1, "bf16"), next(iter(to_prove_of_a_module(1))))
    assert found.weights[-1]["unused"].dtype == torch.bfloat16
    assert difference(zip(found.weights, wanted.weights, strict=True)) <= 2e-2


def test_the_reference_decays_what_is_not_used(reference):
    assert torch.allclose(reference.weights[-1]["unused"], torch.full((3,), (1 - 1e-4) ** STEPS, dtype=torch.float64))


def test_what_is_wanted_to_be_zero_has_to_be():
    one, zero = {"a": torch.ones(1)}, {"a": torch.zeros(1)}
    assert difference([(zero, zero)]) == overall_difference([(zero, zero)]) == step_difference([(0, 0)], [(0, 0)]) == 0
    assert difference([(one, zero)]) == overall_difference([(one, zero)]) == step_difference([(1, 0)], [(0, 0)]) == inf
    assert difference([({"a": torch.ones(0)}, {"a": torch.ones(0)})]) == 0


def test_in_fp64_models_do_not_round_to_fp32():
    x = torch.tensor([1 / 3], dtype=torch.float64)
    with check("mlp", 1).kept_wide():
        for narrow in (x.float(), x.to(torch.float32), x.bfloat16(), F.softmax(x.log(), -1, dtype=torch.float32) * x):
            assert narrow.dtype == torch.float64 and torch.equal(narrow, x)
        assert torch.ones(1, dtype=torch.int64).float().dtype == torch.float32
    with check("mlp", 1, "fp32").kept_wide():
        assert x.float().dtype == torch.float32


def test_cases_are_stages_times_offload():
    assert len(list(to_prove_of_a_module(1))) == 4 and len(list(to_prove_of_a_module(4))) == 16
    assert len(CASES) == len(EVERY_CASE) == 16
