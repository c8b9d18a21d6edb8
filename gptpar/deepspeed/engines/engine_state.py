"""``EngineState``: the attributes of every engine of ``gptpar.initialize``, as its verbs and getters use them."""

from __future__ import annotations

from enum import Enum

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from gptpar.adapter.guards.order_watch import OrderWatch
from gptpar.adapter.options import EngineOptions
from gptpar.adapter.weights import Weights
from gptpar.checkpoint.saver import Saver
from gptpar.deepspeed.engines.batches import BatchSource
from gptpar.deepspeed.engines.frozen_parameters import FrozenParameters
from gptpar.deepspeed.engines.optimizer import EngineOptimizer
from gptpar.engine.engine import Engine
from gptpar.optim.loss_scale import LossScale
from gptpar.optim.skip_step import SkipStep
from gptpar.topology.groups import Topology


class StepGradient(Enum):
    """How far a step's gradient is: passes add to it, or it is summed over processes."""

    GROWS = "grows"
    READ = "summed amid the step, because it was read"
    FINAL = "summed after the step's last pass"


class EngineState(nn.Module):
    """Base of the classes that an engine consists of: :mod:`gptpar.deepspeed.engines.training_engine` joins them.

    Attributes:
        engine: has the parameters, their gradients and the optimizer.
        weights: reads and changes the module's weights for its user.
        topology: this process's place.
    """

    module: nn.Module
    options: EngineOptions
    engine: Engine
    weights: Weights
    topology: Topology
    optimizer: EngineOptimizer
    loss_scaler: LossScale
    lr_scheduler: LRScheduler | None
    skip_step: SkipStep | None
    data: BatchSource
    global_steps: int
    _frozen: FrozenParameters
    _saver: Saver
    _watch: OrderWatch
    _count: int
    _has_begun: bool
    _gradient: StepGradient
    _in_train_batch: bool
    _ended_step: bool
    _norm: float
    _skipped: float

    @property
    def _divisor(self) -> float:
        """The divisor of the sum over processes: the loss scale times their number, unless the sum is wanted."""
        return self.loss_scaler.value * (1 if self.options.sums_gradients else self.topology.mesh.data)

    def train_batch_size(self) -> int:
        """Samples of a step, on all processes."""
        raise NotImplementedError

    def _sum_gradient(self) -> None:
        """Sum the gradient of the step's passes so far over processes, unless it is."""

    def _guard_until_step(self) -> None:
        """Notice torch's clipping until the step, where gradients are not in ``.grad``."""

    def _drop_step(self) -> None:
        raise NotImplementedError

    def _require_open(self) -> None:
        raise NotImplementedError

    def _require_no_step(self) -> None:
        """Raise if another step has begun."""

    def _read_last_step(self) -> None:
        raise NotImplementedError

    def _take_note_of_last_step(self) -> None:
        raise NotImplementedError
