"""``Trainer``: one step on one process, forward and backward over micro-batches, then the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from gptpar.config import Config
from gptpar.config.roles import Role
from gptpar.context_parallel import ContextSplit, divide_samples
from gptpar.data.loader import MicroBatch
from gptpar.engine.engine import PipelinePasses
from gptpar.engine.readings import Readings
from gptpar.engine.step_graph import StepGraph
from gptpar.engine.step_update import StepUpdate
from gptpar.model.dropout import layers_with_dropout, seed_fields
from gptpar.optim.group_ranges import DECAYS
from gptpar.optim.loss_scale import LossScale, make_loss_scale
from gptpar.optim.schedule import Schedule
from gptpar.optim.skip_step import make_skip_step
from gptpar.optim.update import Hyperparameters
from gptpar.pipeline.runtime import MicroBatch as StageInput
from gptpar.run.gpt import make_engine
from gptpar.run.health.layer_norms import ACTIVATION, GRADIENT, UPDATE, LayerNorms, Norms, OldWeights
from gptpar.run.votes import Votes
from gptpar.system.activity import Activity
from gptpar.topology.groups import Topology
from gptpar.topology.initial_values import initialise
from gptpar.topology.mesh import COPIES, DATA, TENSOR

MAX_NET_REDONE = 8
"""Steps are no longer recorded once this many more steps were redone than not; the difference never falls below 0.
If most steps are redone, that is soon; if few are, never."""


@dataclass(frozen=True)
class Step:
    """A step that was launched.

    Attributes:
        readings: loss, gradient norm, skipped (0, 1 or ``skip_step.OUTLIER``), all processes' votes, and what
            :attr:`Trainer.names_of_numbers` names: the model's auxiliary losses and the loads of its experts.
        squares: of this process's gradient, by unit, for the bundle of an outlier; ``None``: none is kept.
        layer_norms: kind of norm -> layer -> norm, at their interval.
    """

    iteration: int
    samples: int
    learning_rate: float
    loss_scale: float
    readings: Readings
    squares: Readings | None = None
    layer_norms: Mapping[str, Norms] = field(default_factory=dict)


class Trainer:
    """Owns the model as this process holds it, and takes its steps.

    Args:
        config: resolved, with the padded vocabulary filled.
        topology: this process's place.
        schedule: learning rate and weight decay.
        activity: records what this process is doing.
        tries_memory: see :func:`~gptpar.run.gpt.make_engine`.

    Attributes:
        steps_done_again: recorded steps whose experts had too many tokens for their memory.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        schedule: Schedule,
        activity: Activity | None = None,
        *,
        tries_memory: bool = False,
    ):
        self.config, self.topology, self.schedule = config, topology, schedule
        self.activity = activity or Activity(topology.rank)
        self.loss_scale: LossScale = make_loss_scale(config.precision)
        made = make_engine(config, topology, tries_memory=tries_memory)
        self.engine, self.host, self._partial_gradient = made.engine, made.host, made.partial_gradient
        self.pipeline, self._groups, self.experts = made.pipeline, made.groups, made.experts
        self._limit, self.steps_done_again, self._net_redone = made.limit, 0, 0
        # Number of samples -> their rows in the micro-batch, kept: copying them to the device would wait for it.
        self._rows: dict[int, torch.Tensor] = {}
        self._split = ContextSplit.of(topology, config.parallel.cp_comm_type)
        divide_samples(self.pipeline.modules(), topology, self._split)
        if config.precision.compile and topology.device.type == "cuda":
            for stage in self.pipeline.stages_here:
                stage.compile_layers(made.model.names(Role.BLOCK))
        specs = (spec for stage in self.pipeline.stages_here for spec in stage.specs)
        self._layers_with_dropout = layers_with_dropout(specs)
        self._graph: StepGraph | None = None
        if (engine := self.engine).settings.records_steps:
            self._graph = StepGraph(
                *(self._forward_backward, engine.gatherer.wait_for_all, engine.finish, engine.graph_breaks),
                quiet=engine.optimizer.guard.wait_until_read,
            )
        self._passes = PipelinePasses(self.engine, self.pipeline, self.activity.note)
        # With --calculate-per-token-loss, what each micro-batch's loss is divided by.
        per_token = config.data.calculate_per_token_loss
        self._divisor = torch.ones((), dtype=torch.float64, device=topology.device) if per_token else None
        self._iteration = 0
        self._num_copies, self._data_position = topology.mesh.size(*COPIES), topology.position(DATA)
        health = config.health
        self.skip_step = make_skip_step(health.skip_step_sigma, health.skip_step_window, topology.device)
        self._readings = partial(Readings, timeout_s=60 * config.parallel.distributed_timeout_minutes)
        self._update = StepUpdate(self.engine, self.skip_step, topology.sum_over_all, self._readings)
        self.layer_norms = LayerNorms(self.engine, self.pipeline.stages_here, topology)
        self._norms_of_outputs: Norms = {}

    def close(self) -> None:
        """Free the recorded step and close the engine, before the processes part."""
        if self._graph is not None:
            self._graph.release()
        self.engine.close()

    def initialise(self) -> None:
        """Give the weights their initial values."""
        weights = self.engine.optimizer.parts("weights")
        inits = {name: param.info.init for name, param in self.engine.table.params.items()}
        initialise(weights, inits, self.config.data.seed)
        self.engine.publish()

    def expect_step(self, progress: float) -> None:
        """Announce the coming step's probable place in the schedules, so that the CPU optimizer may begin it early."""
        self.engine.optimizer.expect_step(self._hyperparameters(progress), self.loss_scale.value)

    def _hyperparameters(self, progress: float) -> tuple[Hyperparameters, ...]:
        """A step's hyperparameters, by parameter group."""
        lr, weight_decay = self.schedule.learning_rate(progress), self.schedule.weight_decay(progress)
        return self._groups.hyperparameters(
            self.config.optimizer,
            lr,
            weight_decay,
            self.schedule.decoupled_rate(progress),
            self.schedule.betas(progress),
        )

    def forward_backward(self, batches: Sequence[MicroBatch], iteration: int) -> torch.Tensor:
        """Accumulate the gradient of the mean loss over this process's micro-batches.

        Dropout is a function of (seed, iteration, place of the micro-batch in the global batch, layer), so that it
        depends neither on the layout nor on whether the run was resumed.

        Returns:
            The mean loss over this process's micro-batches, on the device; zero if it has not the last stage.
        """
        batches = self._own(batches)
        self._passes.scale.fill_(self.loss_scale.value / (len(batches) * self._num_copies))
        self._iteration = iteration
        self._passes.step = f"iteration {iteration + 1}, "
        self.activity.note(f"{self._passes.step}forward and backward")
        if self._divisor is not None:  # then the mean over micro-batches is the mean over all tokens that count
            self._divisor.fill_(sum(batch.num_counted for batch in batches))
            self.topology.sum_over_copies(self._divisor).clamp_(min=1).div_(len(batches) * self._num_copies)
        if self._measures_layers(iteration + 1):
            with torch.no_grad():
                self._norms_of_outputs = self.layer_norms.of_outputs(lambda: self._losses(batches))
        if self._partial_gradient is not None:
            self._partial_gradient.expect_tokens(batches[-1].tokens_BS)
        work, given = self._graph or self._forward_backward, self._on_device(batches)
        if self._limit is None:
            return work(given)
        with self._limit.applied():
            loss = work(given)
        # All processes decide alike, and wait for the step's passes.
        if not self.topology.sum_over_all(self._limit.exceeded.double()).item():
            self._net_redone = max(0, self._net_redone - 1)
            return loss
        self.steps_done_again, self._net_redone = self.steps_done_again + 1, self._net_redone + 1
        loss = self._forward_backward(given) if self._graph is None else self._graph.launch(given)
        if self._net_redone == MAX_NET_REDONE:
            self._graph = self._limit = None
        return loss

    @property
    def limits_rows(self) -> bool:
        """Whether a recorded step limits the tokens of a process's experts, and may have to be done again."""
        return self._limit is not None

    def _forward_backward(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        self.pipeline.train()
        self.engine.begin_gradients(len(batches))
        if self._limit is not None:
            self._limit.exceeded.zero_()
        if self._partial_gradient is not None:
            self._partial_gradient.begin(len(batches))
        inputs = [self._training_input(number, batch) for number, batch in enumerate(batches)]
        losses = self._passes.run(inputs)
        if self.experts.names:
            self.experts.note_choices([fields for _, fields in inputs])
        return torch.stack(losses).mean() if losses else torch.zeros_like(self._passes.scale)

    def _training_input(self, number: int, batch: MicroBatch) -> StageInput:
        tokens, fields = _stage_input(batch, self._passes.scale, self._divisor)
        if self.experts.names:
            fields = {**fields, **self.experts.fields(tokens.numel())}
        if not self._layers_with_dropout:
            return tokens, fields
        place = number * self.topology.mesh.data + self._data_position
        device, rows = self.topology.device, None
        if self._split.size > 1:
            rows = self._rows.get(len(tokens))
            if rows is None:
                places = self._split.places(len(tokens), self.config.model.seq_length)
                rows = self._rows[len(tokens)] = places.flatten().to(device, torch.int32)
        words = self.config.data.seed, self._iteration, place
        return tokens, {**fields, **seed_fields(self._layers_with_dropout, *words, device, rows)}

    def update(
        self,
        loss: torch.Tensor,
        *,
        iteration: int,
        samples: int,
        progress: float,
        stop: bool,
        saves: Sequence[bool] = (),
    ) -> Step:
        """Take an optimizer step.

        Args:
            loss: this process's mean loss.
            samples: samples in the global batch.
            progress: position in the schedules, in their unit.
            stop: this process's vote to end the run; all processes learn of it in the readings.
            saves: this process's votes to save, by target (:class:`~gptpar.run.votes.Votes`).
        """
        self.activity.note(f"iteration {iteration}, optimizer step")
        hyperparameters, scale = self._hyperparameters(progress), self.loss_scale.value
        square = self.engine.gradients.reducer.square()
        measures = self._measures_layers(iteration)
        squares = self._readings(self.engine.gradients.reducer.squares()) if measures or self.keeps_spikes else None
        old = self.layer_norms.old_weights() if measures else None
        others = [
            torch.full_like(square, Votes.number(stop, saves)),
            *self._auxiliary_addends(),
            *self._expert_addends(),
        ]
        _, readings = self._update.take(square, self._addend_of_mean(loss), hyperparameters, scale, others)
        self.experts.advance(self._update.skipped)
        return Step(
            iteration,
            samples,
            hyperparameters[DECAYS].lr,
            scale,
            readings,
            squares,
            {} if old is None or squares is None else self._norms_of_layers(squares, scale, old),
        )

    @property
    def keeps_spikes(self) -> bool:
        """Whether outliers are kept with their batches and norms."""
        return (
            self.skip_step is not None and self.config.health.spike_bundle and self.config.checkpoint.save is not None
        )

    def _measures_layers(self, iteration: int) -> bool:
        interval = self.config.health.log_layer_norms_interval
        return interval is not None and iteration % interval == 0

    def _norms_of_layers(self, squares: Readings, scale: float, old: OldWeights) -> dict[str, Norms]:
        """Norms of the step just launched; waits for the step."""
        return {
            ACTIVATION: self._norms_of_outputs,
            GRADIENT: self.layer_norms.of_gradients(squares.read(), scale),
            UPDATE: self.layer_norms.of_update(old),
        }

    def _addend_of_mean(self, loss: torch.Tensor) -> torch.Tensor:
        """This process's addend to the mean loss: the last stage's tensor ranks all have the loss, others zero."""
        return loss.double() / (self._num_copies * self.topology.mesh.tensor)

    def _auxiliary_addends(self) -> list[torch.Tensor]:
        """This process's addends to the mean auxiliary losses: a layer's tensor ranks have a mean each."""
        count = self._num_copies * self.topology.mesh.tensor
        return [mean / count for mean in self.pipeline.auxiliary.means(self.topology.device)]

    def _expert_addends(self) -> list[torch.Tensor]:
        """This process's addends to numbers about the loads of experts, which all processes know."""
        sum_over_all, mesh = self.topology.sum_over_all, self.topology.mesh
        numbers = self.experts.count(sum_over_all, counts=self.topology.position(TENSOR) == 0)
        return [number / mesh.world_size for number in numbers]

    @property
    def names_of_numbers(self) -> tuple[str, ...]:
        """Names of what a step's readings have behind the votes."""
        return (*self.pipeline.auxiliary.names, *self.experts.numbers)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """The mean loss of one global batch without dropout, over all processes."""
        losses = self._losses(self._own(batches))
        mean = torch.stack(losses).mean() if losses else torch.zeros((), device=self.topology.device)
        return self.topology.sum_over_all(self._addend_of_mean(mean))

    @torch.no_grad()
    def evaluate_sum(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """float64[2]: the sum of the losses of a global batch's tokens without dropout, and how many count.

        Unlike the mean of :meth:`evaluate`, this is right where micro-batches differ in the tokens that count.
        """
        sums, batches = torch.zeros(2, dtype=torch.float64, device=self.topology.device), self._own(batches)
        for loss, batch in zip(self._losses(batches), batches, strict=False):  # only the last stage has losses
            count = batch.num_counted
            sums += torch.stack([loss.double() * count, torch.full_like(sums[0], count)])
        return self.topology.sum_over_all(sums / self.topology.mesh.tensor)

    def _losses(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """Each micro-batch's mean loss, on the last stage; none elsewhere."""
        self.activity.note("evaluation")
        self.pipeline.eval()
        return self.pipeline.evaluate([_stage_input(batch, None) for batch in self._on_device(batches)])

    def _own(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """This process's tokens of its micro-batches."""
        return list(batches) if self._split.size == 1 else [self._split.own_batch(batch) for batch in batches]

    def _on_device(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        device = self.topology.device
        return list(batches) if device.type == "cpu" else [batch.to(device, non_blocking=True) for batch in batches]


def _stage_input(batch: MicroBatch, scale: torch.Tensor | None, loss_divisor: torch.Tensor | None = None) -> StageInput:
    if loss_divisor is None and batch.counted is not None:  # where no label counts, each addend is 0 already
        loss_divisor = batch.counted.clamp(min=torch.finfo(torch.float32).tiny)
    fields = {
        "labels": batch.labels_BS,
        "loss_mask": batch.loss_mask_BS,
        "position_ids": batch.position_ids_BS,
        "cu_seqlens": batch.cu_seqlens,
        "seq_length": batch.tokens_BS.shape[1],
        "scale": scale,
        "loss_divisor": loss_divisor,
    }
    return batch.tokens_BS, fields
