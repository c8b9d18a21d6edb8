"""All mistakes of the table."""

from __future__ import annotations

from tests.mutations.deferred import DEFERRED
from tests.mutations.evaluation import EVALUATION
from tests.mutations.exchange import EXCHANGE
from tests.mutations.experts import EXPERTS
from tests.mutations.first_command import FIRST_COMMAND
from tests.mutations.flags import FLAGS
from tests.mutations.gradients import GRADIENTS
from tests.mutations.matrices import MATRICES
from tests.mutations.model_options import MODEL_OPTIONS
from tests.mutations.offload import OFFLOAD
from tests.mutations.options import OPTIONS
from tests.mutations.parallel import PARALLEL
from tests.mutations.pipelines import PIPELINES
from tests.mutations.ranges import RANGES
from tests.mutations.state import STATE
from tests.mutations.update import UPDATE
from tests.mutations.user_modules import USER_MODULES

MUTATIONS = [
    *UPDATE,
    *GRADIENTS,
    *RANGES,
    *OFFLOAD,
    *PARALLEL,
    *STATE,
    *OPTIONS,
    *FLAGS,
    *FIRST_COMMAND,
    *DEFERRED,
    *PIPELINES,
    *EXCHANGE,
    *MODEL_OPTIONS,
    *EXPERTS,
    *EVALUATION,
    *USER_MODULES,
    *MATRICES,
]
