"""The facts of one training iteration and of one evaluation, as every sink receives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class MemoryStats:
    """State of the device's caching allocator, from ``torch.cuda.memory_stats()``."""

    reserved_bytes: int
    allocated_bytes: int
    max_allocated_bytes: int
    allocated_count: int


@dataclass(frozen=True)
class CpuOptimizerTimes:
    """Times of the CPU optimizer on the main process, from one step's report to the next.

    The CPU optimizer may still update the reported step, or have begun with the next one.

    Attributes:
        waited: milliseconds for which the training loop waited for parameters that were not updated yet.
        busy: milliseconds for which the CPU optimizer worked, whether beside the device or not.
        updating: milliseconds of ``busy`` that updates took; additions of gradients took the others.
        redone: number of steps that it computed again, because its speculation was wrong.
        num_updated: number of elements that it updated.
        num_ahead: number of those that it had updated before the gradient's norm was known.
    """

    waited: float
    busy: float
    updating: float = 0.0
    redone: int = 0
    num_updated: int = 0
    num_ahead: int = 0

    @property
    def ahead(self) -> float | None:
        """The updated elements' fraction that was updated before the norm was known; ``None``: none was updated."""
        return self.num_ahead / self.num_updated if self.num_updated else None


@dataclass(frozen=True)
class IterationRecord:
    """One iteration, or several with times and losses averaged.

    Attributes:
        iteration: number of the iteration that has ended, from 1.
        elapsed_ms: wall time of one iteration.
        lm_loss: mean loss; None when every iteration was skipped.
        grad_norm: norm of the gradient before clipping; None when it is not computed.
        num_skipped, num_nan: of the record's iterations, how many had a gradient, and a loss, that was not finite.
        tflops_per_gpu: TFLOP/s of a GPU by Megatron-LM's formula.
        mfu, mfu_causal: fractions of the peak, counting full and causal attention; None without a known peak.
        progress: finished fraction of the run, from 0 to 1.
        eta_s: seconds to the end of the run.
        host_bytes: memory of this process on the host.
        restarts: how often the workers had been restarted before this iteration.
        auxiliary_losses: name -> sum over the layers that return this loss beside their output.
        num_outliers: iterations since the last record that were skipped for their loss or norm; None: the run skips
            none.
        first_sample: index of the last iteration's first sample among the run's samples.
        layer_norms: ``KIND/LAYER`` -> norm, in iterations that measure them.
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    elapsed_ms: float
    learning_rate: float
    global_batch_size: int
    lm_loss: float | None
    loss_scale: float
    grad_norm: float | None
    num_skipped: int
    num_nan: int
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float | None
    mfu_causal: float | None
    progress: float
    eta_s: float
    skipped_samples: int = 0
    params_norm: float | None = None
    num_zeros: int | None = None
    memory: MemoryStats | None = None
    host_bytes: int | None = None
    cpu_optimizer: CpuOptimizerTimes | None = None
    restarts: int = 0
    auxiliary_losses: Mapping[str, float] = field(default_factory=dict)
    num_outliers: int | None = None
    first_sample: int = 0
    layer_norms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskScores:
    """The scores of an evaluation on a task, and its cost.

    Attributes:
        task: the task's name.
        scores: name -> score: ``acc``, ``acc_norm``, ``acc_bytes``, each with its ``..._stderr``; or ``bits_per_byte``
            and ``byte_perplexity``.
        num_tokens: tokens that the model read, without padding.
        seconds: seconds that the evaluation took.
    """

    task: str
    scores: Mapping[str, float]
    num_items: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True)
class TaskRecord(TaskScores):
    """The scores of one of ``--eval-tasks`` after an iteration."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int


@dataclass(frozen=True)
class ValidationRecord:
    """The mean loss over the validation or the test set after an iteration."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    loss: float
    split: Literal["validation", "test"] = "validation"

    @property
    def perplexity(self) -> float:
        """``exp(loss)``, with the loss capped at 20 as in Megatron-LM."""
        return math.exp(min(self.loss, 20.0))
