"""All faults."""

from __future__ import annotations

from tests.faults.deferred import DEFERRED
from tests.faults.gradients import GRADIENTS
from tests.faults.offload import OFFLOAD
from tests.faults.options import OPTIONS
from tests.faults.parallel import PARALLEL
from tests.faults.pipelines import PIPELINES
from tests.faults.ranges import RANGES
from tests.faults.state import STATE
from tests.faults.update import UPDATE
from tests.faults.user_modules import USER_MODULES

FAULTS = [
    *UPDATE,
    *GRADIENTS,
    *RANGES,
    *OFFLOAD,
    *PARALLEL,
    *STATE,
    *OPTIONS,
    *DEFERRED,
    *PIPELINES,
    *USER_MODULES,
]
