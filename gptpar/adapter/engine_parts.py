"""``EngineParts``: the record of all parts that ``gptpar.initialize`` makes an engine of."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.adapter.guards.failed_passes import FailedPasses
from gptpar.adapter.guards.order_watch import OrderWatch
from gptpar.adapter.weights import Weights
from gptpar.engine.engine import Engine
from gptpar.offload.host_optimizer import HostOptimizer
from gptpar.system.activity import Activity
from gptpar.topology.groups import Topology


@dataclass(frozen=True)
class EngineParts:
    """The parts of which ``gptpar.initialize`` makes an engine for one module.

    Attributes:
        engine: has the parameters, their gradients and the optimizer.
        host: the CPU optimizer; ``None`` without offload.
        weights: reads and changes the module's weights for its user.
        topology: this process's place.
        activity: records what this process is doing.
        watch: compares the order of calls between processes; it is closed with the engine.
        failed: compares passes that ended in an error between processes.
    """

    engine: Engine
    host: HostOptimizer | None
    weights: Weights
    topology: Topology
    activity: Activity
    watch: OrderWatch
    failed: FailedPasses
