"""The optimizers by name, for ``--optimizer`` and a configuration's ``optimizer.type``."""

from __future__ import annotations

from gptpar.optim.adamw import ADAMW
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.lion import LION

OPTIMIZERS: dict[str, ElementwiseOptimizer] = {one.name: one for one in (ADAMW, LION)}
"""Name -> description."""
