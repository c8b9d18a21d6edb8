"""A user's module trains as in plain PyTorch, and one that does not is found out."""

from math import inf

import torch
from torch.nn import functional as F

from gptpar.adapter.user_module import load_user_function
from gptpar.cli.check_layouts.compare import difference, overall_difference, step_difference
from gptpar.cli.check_layouts.module_training import ModuleCheck, train_case, train_plainly
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.plan.space.spaces import to_prove_of_a_module
from tests.spawn import spawn

TOLERANCE, STEPS = 1e-12, 3
CASES = list(to_prove_of_a_module(2))
"""Each ZeRO stage with each kind of offload."""


def check(name: str, processes: int, number_format: str = "fp64") -> ModuleCheck:
    return ModuleCheck(load_user_function(f"tests.fixtures.user_modules:{name}"), number_format, processes, STEPS)


def train_all(rank: int) -> tuple[list[Outcome], Outcome]:
    """Every case of the module, and one of another whose loss depends on the rank."""
    zero2 = next(case for case in CASES if case.name == "2 processes, ZeRO-2")
    return [train_case(check("mlp", 2), case) for case in CASES], train_case(check("depends_on_rank", 2), zero2)


def worst(found: Outcome, wanted: Outcome) -> float:
    assert len(found.steps) == len(found.gradients) == len(found.weights) == STEPS
    return max(
        difference([(found.initial, wanted.initial)]),
        step_difference(found.steps, wanted.steps),
        difference(zip(found.gradients, wanted.gradients, strict=True)),
        difference(zip(found.weights, wanted.weights, strict=True)),
    )


def test_two_processes_are_plain_pytorch_and_what_depends_on_the_rank_is_found_out() -> None:
    plain = train_plainly(check("mlp", 2), torch.device("cpu"))
    decayed = torch.full((3,), (1 - 1e-4) ** STEPS, dtype=torch.float64)
    assert torch.allclose(plain.weights[-1]["unused"], decayed)  # although no gradient reaches it
    outcomes, wrong = spawn(train_all, 2)[0]
    assert len(CASES) == len({case.name for case in CASES}) == 16
    for case, found in zip(CASES, outcomes, strict=True):
        assert worst(found, plain) <= TOLERANCE, case.name
    assert 1e-8 < worst(wrong, plain) < 1e-4


def test_one_process_is_plain_pytorch() -> None:
    """In bf16, too."""
    plain = train_plainly(check("with_loss_fn", 1), torch.device("cpu"))
    cases = list(to_prove_of_a_module(1))
    assert len(cases) == 4
    for case in cases:
        assert worst(train_case(check("with_loss_fn", 1), case), plain) <= TOLERANCE, case.name
    plain = train_plainly(check("mlp", 1, "bf16"), torch.device("cpu"))
    found = train_case(check("mlp", 1, "bf16"), cases[0])
    assert found.weights[-1]["unused"].dtype == torch.bfloat16
    assert difference(zip(found.weights, plain.weights, strict=True)) <= 2e-2


def test_what_is_wanted_to_be_zero_has_to_be() -> None:
    one, zero = {"a": torch.ones(1)}, {"a": torch.zeros(1)}
    assert difference([(zero, zero)]) == overall_difference([(zero, zero)]) == step_difference([(0, 0)], [(0, 0)]) == 0
    assert difference([(one, zero)]) == overall_difference([(one, zero)]) == step_difference([(1, 0)], [(0, 0)]) == inf
    assert difference([({"a": torch.ones(0)}, {"a": torch.ones(0)})]) == 0


def test_in_fp64_models_do_not_round_to_fp32() -> None:
    x = torch.tensor([1 / 3], dtype=torch.float64)
    with check("mlp", 1).kept_wide():
        for narrow in (x.float(), x.to(torch.float32), x.bfloat16(), F.softmax(x.log(), -1, dtype=torch.float32) * x):
            assert narrow.dtype == torch.float64 and torch.equal(narrow, x)
        assert torch.ones(1, dtype=torch.int64).float().dtype == torch.float32
    with check("mlp", 1, "fp32").kept_wide():
        assert x.float().dtype == torch.float32
