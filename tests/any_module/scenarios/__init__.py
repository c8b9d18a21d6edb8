"""What users do beside training, by name: the engine goes on with the same numbers."""

from dataclasses import replace

from tests.any_module.case import Case, by_name
from tests.any_module.oddities import ODDITIES
from tests.any_module.scenarios.beside import BESIDE
from tests.any_module.scenarios.failing import FAILING
from tests.any_module.scenarios.weights import WEIGHTS
from tests.any_module.zoo import ZOO


def resumed(case: Case) -> Case:
    """Saved in the middle, at another stage and size, and resumed."""
    return replace(case, name=f"{case.name}_resumed", resumed=True)


SAVED = ["tied_weights", "tied_blocks", "frozen_block", "odd_parameters", "parameter_groups_across_blocks"]
SAVED += ["clients_schedule"]
RESUMED = [*(resumed(ZOO[name]) for name in ("gpt2", "llama", "cnn")), *(resumed(ODDITIES[name]) for name in SAVED)]
SCENARIOS = by_name([*FAILING, *BESIDE, *WEIGHTS, *RESUMED])
