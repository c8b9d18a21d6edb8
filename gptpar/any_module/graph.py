"""Whether and how ``train_batch`` records its steps as CUDA graphs."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from gptpar.any_module.batches import Batches
from gptpar.any_module.options import EngineOptions
from gptpar.any_module.step_work import StepResult, StepWork
from gptpar.engine.engine import Engine
from gptpar.engine.step_graph import Recorder, StepGraph
from gptpar.errors import ConfigError

LAUNCHED_STEPS = 3
"""Steps of a stranger's module that have to be alike before one is recorded."""


def graph_obstacles(options: EngineOptions, world: int) -> Iterator[str]:
    """What needs the host in the middle of a step, each as a part of a sentence."""
    if world > 1 and options.zero_stage >= 2:
        yield f"zero_optimization.stage {options.zero_stage} gives and takes memory during the step (use stage 1)"
    if world > 1 and options.offload.ratio:
        yield "zero_optimization.offload_optimizer waits for each unit, amid the messages of several processes"
    if options.offload.parameters:
        yield "zero_optimization.offload_param brings and drops parameters during the step"


def check_graph(options: EngineOptions, world: int) -> None:
    """Refuse a step graph that is demanded where there can be none.

    Raises:
        ConfigError: with all reasons.
    """
    if options.step_graph == "on":
        problems = [f"gptpar.step_graph: {reason}." for reason in graph_obstacles(options, world)]
        if problems:
            raise ConfigError(problems)


def wants_graph(options: EngineOptions, world: int, device: torch.device) -> bool:
    """Whether steps are to be recorded; with ``auto``, where nothing speaks against it.

    Under ZeRO-1 it would be slower: a recorded step has to wait for all parameters to be gathered, while one that is
    launched bit by bit waits for each unit's.
    """
    if device.type != "cuda" or options.step_graph == "off":
        return False
    gathers = world > 1 and options.zero_stage == 1
    return options.step_graph == "on" or not (gathers or any(graph_obstacles(options, world)))


class RecordedWork:
    """A step's passes, launched at first and replayed once some steps were alike.

    A recording does what the recorded step did. The values of tensors are read anew: micro-batches, parameters,
    buffers, the loss scale, the state of torch's default generator. What the module decides in Python is not: numbers
    and random choices of Python, the blocks it calls. The micro-batches' shapes and plain values and the modules' modes
    are compared before each step; what the module reads elsewhere cannot be.

    Args:
        recorder: default: of CUDA graphs.
    """

    def __init__(self, module: nn.Module, work: StepWork, engine: Engine, recorder: Recorder | None = None):
        self._module = module
        self._graph: StepGraph[tuple[Batches, list[bool]], StepResult] = StepGraph(
            lambda given: work(given[0]),
            engine.gatherer.wait_for_all,
            engine.finish,
            engine.graph_breaks,
            launched_steps=LAUNCHED_STEPS,
            given_up=_warn,
            recorder=recorder,
        )

    def __call__(self, batches: Batches) -> StepResult:
        """All passes of a step; the loss is overwritten by the next call."""
        return self._graph((batches, [module.training for module in self._module.modules()]))

    def release(self) -> None:
        """Forget the recording."""
        self._graph.release()


def _warn(reason: Exception) -> None:
    said = (str(reason) or type(reason).__name__).splitlines()[0]
    frames = [frame for frame in traceback.extract_tb(reason.__traceback__) if "/torch/" not in frame.filename]
    warnings.warn(
        f"train_batch launches each step bit by bit, because recording it as a graph failed: {said} "
        f"({frames[-1].filename}:{frames[-1].lineno}). A recorded step must not wait for the device; "
        '{"gptpar": {"step_graph": false}} says so from the start.',
        stacklevel=2,
    )
