"""What stands behind an engine for any module."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.any_module.order_watch import OrderWatch
from gptpar.any_module.weights import Weights
from gptpar.engine.engine import Engine
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.system.activity import Activity
from gptpar.topology.groups import Topology


@dataclass(frozen=True)
class EngineParts:
    """Made once by ``gptpar.initialize``, around one module.

    Attributes:
        engine: has the parameters, their gradients and the optimizer.
        host: the CPU optimizer; ``None``: nothing is offloaded.
        weights: the module's, as its user reads and changes them.
        topology: this process's place.
        activity: is told what this process is doing.
        watch: over the order of calls; it is closed with the engine.
    """

    engine: Engine
    host: HostOptimizer | None
    weights: Weights
    topology: Topology
    activity: Activity
    watch: OrderWatch
