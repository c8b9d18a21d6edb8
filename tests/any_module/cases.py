"""All cases by name: models, oddities and scenarios."""

from tests.any_module.case import by_name
from tests.any_module.oddities import ODDITIES
from tests.any_module.scenarios import SCENARIOS
from tests.any_module.zoo import ZOO

CASES = by_name([*ZOO.values(), *ODDITIES.values(), *SCENARIOS.values()])
