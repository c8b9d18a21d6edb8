"""Records the steps of ``train_batch`` as CUDA graphs."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from gptpar.adapter.options import EngineOptions
from gptpar.deepspeed.engines.batches import Batches
from gptpar.deepspeed.engines.step_work import StepResult, StepWork
from gptpar.engine.engine import Engine
from gptpar.engine.step_graph import Recorder, StepGraph
from gptpar.errors import ConfigError, first_line

LAUNCHED_STEPS = 3
"""Number of equal steps of a user's module before one is recorded."""


def graph_obstacles(options: EngineOptions, world: int) -> Iterator[str]:
    """What needs the host within a step, each reason as a part of a sentence."""
    if world > 1 and options.zero_stage >= 2:
        yield f"zero_optimization.stage {options.zero_stage} gives and takes memory during the step (use stage 1)"
    if world > 1 and options.offload.least_ratio:
        yield "zero_optimization.offload_optimizer waits for each unit, between the messages of several processes"
    if options.offload.cpu_parameters:
        yield "zero_optimization.offload_param brings and drops parameters during the step"


def check_graph(options: EngineOptions, world: int) -> None:
    """Check that there can be a step graph if the configuration demands one.

    Raises:
        ConfigError: there cannot; it names all reasons.
    """
    if options.step_graph == "on":
        problems = [f"gptpar.step_graph: {reason}." for reason in graph_obstacles(options, world)]
        if problems:
            raise ConfigError(problems)


def wants_graph(options: EngineOptions, world: int, device: torch.device) -> bool:
    """Whether steps are recorded. With ``auto`` they are if there is no obstacle and a recording is not slower.

    Under ZeRO-1 it would be slower: a recorded step has to wait until all parameters are gathered, while one whose
    kernels are launched one by one waits for each unit's parameters.
    """
    if device.type != "cuda" or options.step_graph == "off":
        return False
    gathers = world > 1 and options.zero_stage == 1
    return options.step_graph == "on" or not (gathers or any(graph_obstacles(options, world)))


class RecordedWork:
    """A step's passes, launched at first, and replayed after some equal steps.

    A replay repeats the recorded step with new values of tensors: micro-batches, parameters, buffers, the loss scale,
    the state of torch's default generator. It does not repeat decisions of the module in Python, such as its numbers
    and random choices, or which blocks it calls. Before each step, the micro-batches' shapes and plain values, the
    modules' modes and the frozen parameters are compared with the recorded ones; other values that the module reads
    cannot be compared.

    Args:
        module: the model.
        work: a step's passes.
        engine: of the model.
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
            quiet=engine.optimizer.guard.wait_until_read,
            given_up=_warn,
            recorder=recorder,
        )

    def __call__(self, batches: Batches) -> StepResult:
        """All passes of a step; the loss is overwritten by the next call."""
        modes = [module.training for module in self._module.modules()]
        return self._graph((batches, modes + [parameter.requires_grad for parameter in self._module.parameters()]))

    def release(self) -> None:
        """Drop the recording."""
        self._graph.release()


def _warn(reason: Exception) -> None:
    said = first_line(reason)
    torchs = os.path.join(os.path.dirname(torch.__file__), "")  # the environment's folder may be named so, too
    frames = [frame for frame in traceback.extract_tb(reason.__traceback__) if not frame.filename.startswith(torchs)]
    warnings.warn(
        f"train_batch launches each step kernel by kernel, because recording it as a graph failed: {said} "
        f"({frames[-1].filename}:{frames[-1].lineno}). A recorded step must not wait for the device; "
        '{"gptpar": {"step_graph": false}} turns recording off.',
        stacklevel=2,
    )
