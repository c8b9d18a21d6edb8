"""The optimizers by name, for ``--optimizer`` and a configuration's ``optimizer.type``."""

from __future__ import annotations

from gptpar.config.sections.optimizer import OptimizerOptions
from gptpar.optim.adamw import ADAMW
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.lion import LION
from gptpar.optim.muon import MUON, Muon
from gptpar.optim.update import Update

OPTIMIZERS: dict[str, Update] = {one.name: one for one in (ADAMW, LION, MUON)}
"""Name -> description."""


def updates_of(flags: OptimizerOptions) -> tuple[Update, ElementwiseOptimizer]:
    """The update of the blocks' matrices in a run, and that of all other parameters."""
    chosen = OPTIMIZERS[flags.optimizer]
    if isinstance(chosen, ElementwiseOptimizer):
        return chosen, chosen
    assert isinstance(chosen, Muon)
    return chosen.with_settings(flags), ADAMW
