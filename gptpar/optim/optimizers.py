"""The optimizers by name, for ``--optimizer`` and a configuration's ``optimizer.type``."""

from __future__ import annotations

from gptpar.config.sections.optimizer import OptimizerFlags
from gptpar.optim.adamw import ADAMW, adamw_with
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.lion import LION
from gptpar.optim.matrix_update import MatrixUpdate
from gptpar.optim.muon import MUON
from gptpar.optim.update import Update

OPTIMIZERS: dict[str, Update] = {one.name: one for one in (ADAMW, LION, MUON)}
"""Name -> description."""


def updates_of(flags: OptimizerFlags) -> tuple[MatrixUpdate | None, ElementwiseOptimizer]:
    """The update over the blocks' matrices, if a run has one, and that of all other parameters."""
    chosen = OPTIMIZERS[flags.optimizer]
    if isinstance(chosen, MatrixUpdate):
        return chosen.with_settings(flags), ADAMW
    assert isinstance(chosen, ElementwiseOptimizer)
    return None, adamw_with(flags.exp_avg_dtype, flags.exp_avg_sq_dtype) if chosen is ADAMW else chosen
