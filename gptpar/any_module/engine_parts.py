"""``EngineParts``: what ``gptpar.initialize`` makes an engine of, for a module and for a pipeline of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gptpar.any_module.build import build_engine
from gptpar.any_module.compiled_blocks import compile_blocks
from gptpar.any_module.deferred import Recording
from gptpar.any_module.failed_passes import FailedPasses
from gptpar.any_module.options import EngineOptions
from gptpar.any_module.order_watch import OrderWatch, name_of_engine
from gptpar.any_module.placed import PlacedParameters
from gptpar.any_module.weights import Weights
from gptpar.engine.data_axes import wait_without_limit
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


def make_parts(
    stage: PlacedParameters,
    groups: Sequence[dict[str, Any]],
    options: EngineOptions,
    topology: Topology,
    activity: Activity,
    watch: OrderWatch,
    recording: Recording | None = None,
    *,
    notes_units: bool = False,
) -> EngineParts:
    """Build the engine and what surrounds it; all processes call this together.

    Args:
        stage: the module, or the layers that this process has, with buffers on the device.
        groups: of the optimizer.
        recording: makes the values of parameters without memory.
        notes_units: whether ``watch`` notes units, where they are gathered in the order of calls, and waits for their
            collectives.

    Raises:
        GptparError: host memory does not suffice for offload.
    """
    wait_for = watch.wait_for if notes_units else wait_without_limit
    engine, host, frozen = build_engine(stage, groups, options, topology, recording, wait_for)
    name = name_of_engine(topology)
    watch.start(name, notes_units=notes_units and engine.gatherer.gathers_in_call_order)
    compile_blocks(stage, options, topology.device)
    weights, failed = Weights(stage, engine, frozen, topology), FailedPasses(topology, name, watch)
    return EngineParts(engine, host, weights, topology, activity, watch, failed)
