"""The computation of one step on one process: forward and backward over micro-batches, then the update."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gptpar.config import Config
from gptpar.data.loader import MicroBatch
from gptpar.init import initialise, seed_of
from gptpar.model.block import Block
from gptpar.model.gpt import gpt_layers
from gptpar.optim.adamw import MasterAdamW
from gptpar.optim.flat import FlatLayout
from gptpar.optim.gradients import GradientSum
from gptpar.optim.loss_scale import LossScale, make_loss_scale
from gptpar.optim.schedule import Schedule
from gptpar.pipeline import Stage
from gptpar.topology import Topology

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


class Moment:
    """A point in the device's work, for timing it without waiting for it."""

    def __init__(self, device: torch.device):
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._host = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Return when the device has got here."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Moment) -> float:
        """Time that passed on the device; both moments must have been waited for or lie in the past."""
        if self._event is not None and earlier._event is not None:
            return earlier._event.elapsed_time(self._event) / 1e3
        return self._host - earlier._host


class Readings:
    """Numbers on their way from the device; the host goes on until it asks for them.

    Attributes:
        moment: when they were ready.
    """

    def __init__(self, numbers: Sequence[torch.Tensor]):
        stacked = torch.stack([n.detach().double() for n in numbers])
        self._host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=stacked.is_cuda)
        self._host.copy_(stacked, non_blocking=True)
        self.moment = Moment(stacked.device)

    def read(self) -> list[float]:
        """Wait for this step, not for what was queued after it."""
        self.moment.wait()
        return self._host.tolist()


@dataclass(frozen=True)
class Step:
    """A step that was launched. ``readings`` are loss, gradient norm, skipped (0 or 1) and votes to stop."""

    iteration: int
    samples: int
    learning_rate: float
    loss_scale: float
    readings: Readings


class Trainer:
    """Owns the live model, its gradient sum and its optimizer.

    Args:
        config: resolved, with the padded vocabulary filled.
        topology: this process's place.
        schedule: learning rate and weight decay.
    """

    def __init__(self, config: Config, topology: Topology, schedule: Schedule):
        self.config, self.topology, self.schedule = config, topology, schedule
        self.loss_scale: LossScale = make_loss_scale(config.precision)
        dtype = DTYPES[config.precision.dtype]
        self.stage = Stage(gpt_layers(config.model), recompute=recomputed_layers(config))
        layout = FlatLayout.of({name: p.shape for name, p in self.stage.global_parameters().items()})
        self.optimizer = MasterAdamW(layout, dtype, topology.device, config.optimizer)
        self.stage.place(layout.views(self.optimizer.live))
        parameters = self.stage.global_parameters()
        self.gradients = GradientSum(parameters, layout, self.optimizer.grad, topology.data_group)
        if config.precision.compile and topology.device.type == "cuda":
            self.stage.compile_layers(Block)

    def initialise(self) -> None:
        """Give the weights their initial values."""
        weights = self.optimizer.state_tensors()["weights"]
        initialise(weights, self.stage.global_inits(), self.config.data.seed)
        self.optimizer.publish()

    def forward_backward(self, batches: Sequence[MicroBatch], iteration: int) -> torch.Tensor:
        """Accumulate the gradient of the mean loss over this process's micro-batches.

        Dropout is a function of (seed, iteration, place of the micro-batch in the global batch), so that it depends
        neither on the number of processes nor on whether the run was resumed.

        Returns:
            The mean loss over this process's micro-batches, on the device.
        """
        dp, rank = self.topology.layout.data, self.topology.data_rank
        device = self.topology.device
        total = torch.zeros((), dtype=self.optimizer.master.dtype, device=device)
        scale = torch.full_like(total, self.loss_scale.value / (len(batches) * dp))
        self.stage.train()
        self.gradients.begin()
        for i, batch in enumerate(batches):
            torch.manual_seed(seed_of(self.config.data.seed, "dropout", iteration, i * dp + rank))
            if i == len(batches) - 1:
                self.gradients.expect_last()
            loss = self._loss(batch, scale)
            loss.backward(scale)
            total += loss.detach() / len(batches)
        self.gradients.finish()
        return total

    def _loss(self, batch: MicroBatch, scale: torch.Tensor | None) -> torch.Tensor:
        batch = batch.to(self.topology.device, non_blocking=True)
        fields = {
            "labels": batch.labels_BS,
            "loss_mask": batch.loss_mask_BS,
            "position_ids": batch.position_ids_BS,
            "document_ids": batch.document_ids_BS,
            "scale": scale,
        }
        return self.stage(batch.tokens_BS, fields)

    def update(self, loss: torch.Tensor, *, iteration: int, samples: int, progress: float, stop: bool) -> Step:
        """Take an optimizer step.

        Args:
            loss: this process's mean loss.
            samples: samples in the global batch.
            progress: position in the schedules, in their unit.
            stop: this process's vote to end the run; all processes learn of it in the readings.
        """
        lr, scale = self.schedule.learning_rate(progress), self.loss_scale.value
        result = self.optimizer.step(lr, self.schedule.weight_decay(progress), scale)
        sums = torch.stack([loss / self.topology.layout.data, torch.full_like(loss, float(stop))])
        mean_loss, votes = self.topology.sum_over_data(sums)
        return Step(iteration, samples, lr, scale, Readings([mean_loss, result.grad_norm, result.skipped, votes]))

    @torch.no_grad()
    def evaluate(self, batches: Sequence[MicroBatch]) -> torch.Tensor:
        """The mean loss of one global batch without dropout, over all processes."""
        self.stage.eval()
        losses = torch.stack([self._loss(batch, None) for batch in batches])
        return self.topology.sum_over_data(losses.mean()) / self.topology.layout.data


def recomputed_layers(config: Config) -> frozenset[str]:
    """Names of the layers whose activations are computed again in the backward pass."""
    if config.recompute.recompute_granularity is None:
        return frozenset()
    assert config.model.num_layers
    count = config.recompute.recompute_num_layers or config.model.num_layers
    return frozenset(f"layers.{i}" for i in range(min(count, config.model.num_layers)))
