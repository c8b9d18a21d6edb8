"""The engine of a pipeline of layers: DeepSpeed's ``train_batch`` and ``eval_batch``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch

from gptpar.any_module.batches import cast_inputs, described, mean_of
from gptpar.any_module.engine_parts import EngineParts
from gptpar.any_module.layer_stages import LayerStages
from gptpar.any_module.options import EngineOptions
from gptpar.any_module.step_work import StepResult
from gptpar.any_module.training_engine import TrainingEngine
from gptpar.engine.engine import Engine
from gptpar.errors import GptparError
from gptpar.pipeline.module import PipelineModule
from gptpar.pipeline.runtime import MicroBatch
from gptpar.system.activity import Activity


class PipelineEngine(TrainingEngine):
    """Trains a pipeline of layers, a whole step at a time.

    A micro-batch is (inputs, labels): inputs are a tensor, labels are what the pipeline's ``loss_fn(output, labels)``
    takes. All stages of a pipeline get the same micro-batches; each data-parallel rank gets its own.

    Parameters are named ``layer.parameter``, such as ``layers.3.weight`` or ``tied.embedding.weight``; the names do not
    depend on the number of stages.

    Args:
        pipeline: the layers.
        stages: those of this process, on the engine.

    The other arguments are those of :class:`~gptpar.any_module.training_engine.TrainingEngine`.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        stages: LayerStages,
        parts: EngineParts,
        groups: list[dict[str, Any]],
        options: EngineOptions,
    ):
        cast = partial(cast_inputs, dtype=options.input_dtype)
        work = PipelineWork(pipeline, stages, parts.engine, cast, parts.activity)
        super().__init__(pipeline, work, parts, groups, options)

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: a pipeline's stages work on several micro-batches at once; :meth:`train_batch` calls them."""
        raise GptparError(
            "a pipeline takes whole steps: call engine.train_batch(data_iter) or engine.eval_batch(data_iter) in place "
            "of engine(...), engine.backward(...) and engine.step()."
        )

    backward = step = forward

    def is_first_stage(self) -> bool:
        """Whether this process has the first layer."""
        return self.topology.stage == 0

    def is_last_stage(self) -> bool:
        """Whether this process has the last layer, and computes the loss."""
        return self.topology.stage == self.topology.mesh.pipeline - 1


class PipelineWork:
    """Runs the passes of a step by the pipeline's schedule.

    Args:
        pipeline: the layers.
        stages: those of this process, on the engine.
        engine: has their parameters.
        cast: casts the inputs of a micro-batch.
        activity: records what this process is doing.

    Attributes:
        scale: the incoming gradient of each loss, on the device: the loss scale over the number of micro-batches.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        stages: LayerStages,
        engine: Engine,
        cast: Callable[[Any], Any],
        activity: Activity,
    ):
        self._pipeline, self._stages, self._engine = pipeline, stages, engine
        self._cast, self._activity = cast, activity
        self.scale = torch.ones((), dtype=engine.settings.wide, device=engine.device)
        self._no_loss = torch.zeros_like(self.scale)

    def __call__(self, batches: Sequence[Any]) -> StepResult:
        """All passes of a step.

        Raises:
            GptparError: a micro-batch is not (inputs, labels), or gradients are turned off.
        """
        if not torch.is_grad_enabled():
            raise GptparError("train_batch was called under torch.no_grad(): call it outside.")
        inputs = [self._input_of(batch) for batch in batches]
        self._engine.begin_gradients(len(inputs))
        observer = _PassObserver(self._engine, self._stages, self._activity, len(inputs))
        with self._activity.lost_ranks_explained():
            losses = self._pipeline.forward_backward(inputs, grad=self.scale, observer=observer)
            self._engine.gradients.finish()
        self._engine.gatherer.let_all_go()
        return self.result(mean_of(losses) if losses else None)

    def evaluate(self, batches: Sequence[Any]) -> torch.Tensor:
        """[] the mean loss over this process's micro-batches, fp32 or wider; zero where another stage has it.

        Raises:
            GptparError: a micro-batch is not (inputs, labels).
        """
        inputs = [self._input_of(batch) for batch in batches]
        with self._activity.lost_ranks_explained():
            losses = self._pipeline.evaluate(inputs)
        return mean_of(losses) if losses else self._no_loss

    def result(self, loss: torch.Tensor | None = None) -> StepResult:
        """The result of the passes that have ended."""
        late = self._engine.gradients.collector.late
        return StepResult(self._no_loss if loss is None else loss, (), tuple(sorted(late)))

    def _input_of(self, batch: Any) -> MicroBatch:
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not isinstance(batch[0], torch.Tensor):
            what = f"({', '.join(map(described, batch))})" if isinstance(batch, tuple | list) else described(batch)
            raise GptparError(
                f"a micro-batch of a pipeline is (inputs, labels), inputs a tensor, and not {what}: let the loader's "
                "collate_fn make such pairs; what layers need beside the inputs can be packed into that tensor."
            )
        return self._cast(batch[0]), {"labels": batch[1]}


@dataclass
class _PassObserver:
    """Tells the engine of each forward and backward pass of the schedule."""

    engine: Engine
    stages: LayerStages
    activity: Activity
    num_micro_batches: int

    def before_forward(self, micro_batch: int, virtual_stage: int) -> None:
        self._note(micro_batch, virtual_stage, "forward")
        self.engine.gradients.begin_forward(last=self._is_last(micro_batch))

    def before_backward(self, micro_batch: int, virtual_stage: int, output: torch.Tensor) -> None:
        self._note(micro_batch, virtual_stage, "backward")
        self.engine.gradients.begin_backward(virtual_stage, last=self._is_last(micro_batch))
        if output.requires_grad:
            collector = self.engine.gradients.collector
            output.register_hook(lambda _: collector.enter_backward(torch._C._current_graph_task_id()))

    def after_backward(self, micro_batch: int, virtual_stage: int) -> None:
        self.engine.gradients.end_backward()
        for units in self.stages.stages[virtual_stage].units_by_layer().values():
            for unit in units:  # frozen units have no gradient whose hook could tell
                self.engine.gatherer.backward_done(unit)

    def _is_last(self, micro_batch: int) -> bool:
        return micro_batch == self.num_micro_batches - 1

    def _note(self, micro_batch: int, virtual_stage: int, what: str) -> None:
        self.activity.note(f"micro-batch {micro_batch + 1}, virtual stage {virtual_stage + 1}, {what}")
