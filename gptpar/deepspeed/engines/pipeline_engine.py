"""The engine of a pipeline of layers: DeepSpeed's ``train_batch`` and ``eval_batch``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from gptpar.adapter.engine_parts import EngineParts
from gptpar.adapter.layer_stages import LayerStages
from gptpar.adapter.options import EngineOptions
from gptpar.adapter.pipeline_module import PipelineModule
from gptpar.deepspeed.engines.batches import cast_inputs, described, evaluating, mean_of
from gptpar.deepspeed.engines.step_work import StepResult
from gptpar.deepspeed.engines.training_engine import TrainingEngine
from gptpar.engine.engine import Engine, PipelinePasses
from gptpar.errors import GptparError
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

    The other arguments are those of :class:`~gptpar.deepspeed.engines.training_engine.TrainingEngine`.
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

    _work: PipelineWork

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of micro-batches, or what else is asked for, in eval mode and without gradients.

        Afterwards each module has its former mode.

        Args:
            data_iter: has this process's micro-batches.
            return_logits: return the pair of the result and of the last micro-batch's output of the last layer, which
                other stages have as ``None``.
            compute_loss: whether the result is of losses, or of the last layer's outputs.
            reduce_output: ``avg``: the mean over micro-batches and processes; ``None``: a list of all values of this
                process. Stages without the last layer have ``None``, unless a loss is broadcast.
            bcast_loss: whether all stages get the mean loss.
            num_micro_batches: default: as many as a step has.

        Raises:
            StopIteration: the data is at its end.
            GptparError: the data ends within the batch, there is no loss, or another reduction is asked for.
        """
        self._require_usable()
        if reduce_output not in ("avg", None):
            raise GptparError(f"eval_batch(reduce_output={reduce_output!r}): it is 'avg', or None for a list.")
        outputs: list[torch.Tensor] = []
        batches = self.data.take(data_iter, num_micro_batches)
        with self._watch.together("eval_batch"), evaluating(self):
            losses = self._work.evaluate(batches, outputs, with_loss=compute_loss)
            found = self._reduced(losses if compute_loss else outputs, reduce_output, compute_loss and bcast_loss)
        return (found, outputs[-1] if outputs else None) if return_logits else found

    def _reduced(self, values: list[torch.Tensor], reduce_output: str | None, to_all: bool) -> Any:
        """The mean over micro-batches and processes; or all values. ``None`` where another stage has them."""
        if reduce_output is None:
            return list(values) if self.is_last_stage() else None
        if to_all:
            mean = mean_of(values) if values else self._work.no_loss
            return self.topology.sum_over_all(self._addend_of_mean(mean)).to(mean.dtype)
        return (
            self.topology.sum_over_copies(torch.stack(values).sum(0) / (len(values) * self.dp_world_size))
            if values
            else None
        )

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


class PipelineWork(PipelinePasses):
    """Runs the passes of a step over a user's layers. Layers may be frozen, and passes may be nested.

    Args:
        stages: those of this process, on the engine.
        cast: casts the inputs of a micro-batch.
        activity: records what this process is doing.

    Attributes:
        no_loss: zero, in the number format of mean losses.
    """

    def __init__(
        self,
        pipeline: PipelineModule,
        stages: LayerStages,
        engine: Engine,
        cast: Callable[[Any], Any],
        activity: Activity,
    ):
        super().__init__(engine, pipeline, activity.note)
        self._stages, self._cast, self._activity = stages, cast, activity
        self.no_loss = torch.zeros_like(self.scale)

    def __call__(self, batches: Sequence[Any]) -> StepResult:
        """All passes of a step.

        Raises:
            GptparError: a micro-batch is not (inputs, labels), or gradients are turned off.
        """
        if not torch.is_grad_enabled():
            raise GptparError("train_batch was called under torch.no_grad(): call it outside.")
        inputs = [self._input_of(batch) for batch in batches]
        self.engine.begin_gradients(len(inputs))
        with self._activity.lost_ranks_explained():
            losses = self.run(inputs)
        self.engine.gatherer.release_all()
        return self.result(mean_of(losses) if losses else None)

    def before_backward(self, micro_batch: int, virtual_stage: int, output: torch.Tensor) -> None:
        """Also watch where the pass enters autograd: backward passes inside of it have other numbers."""
        super().before_backward(micro_batch, virtual_stage, output)
        if output.requires_grad:
            collector = self.engine.gradients
            output.register_hook(lambda _: collector.enter_backward(torch._C._current_graph_task_id()))

    def after_backward(self, micro_batch: int, virtual_stage: int) -> None:
        """Also let frozen units go, which have no gradient whose hook could tell."""
        super().after_backward(micro_batch, virtual_stage)
        for units in self._stages.stages[virtual_stage].units_by_layer().values():
            for unit in units:
                self.engine.gatherer.backward_done(unit)

    def evaluate(
        self, batches: Sequence[Any], outputs: list[torch.Tensor], *, with_loss: bool = True
    ) -> list[torch.Tensor]:
        """The losses of this process's micro-batches; none where another stage has them.

        Args:
            outputs: receives the last layer's outputs, if this process has it.

        Raises:
            GptparError: a micro-batch is not (inputs, labels).
        """
        inputs = [self._input_of(batch) for batch in batches]
        with self._activity.lost_ranks_explained():
            if with_loss:
                return self.pipeline.evaluate(inputs, outputs.append)
            outputs += self.pipeline.outputs(inputs)
            return []

    def result(self, loss: torch.Tensor | None = None) -> StepResult:
        """The result of the passes that have ended."""
        late = self.engine.gradients.late
        return StepResult(self.no_loss if loss is None else loss, (), tuple(sorted(late)))

    def _input_of(self, batch: Any) -> MicroBatch:
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        if not pair or not isinstance(batch[0], torch.Tensor):
            what = f"({', '.join(map(described, batch))})" if isinstance(batch, tuple | list) else described(batch)
            raise GptparError(
                f"a micro-batch of a pipeline is (inputs, labels), inputs a tensor, and not {what}: let the loader's "
                "collate_fn make such pairs; what layers need beside the inputs can be packed into that tensor."
            )
        return self._cast(batch[0]), {"labels": batch[1]}
