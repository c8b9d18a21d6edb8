"""The scalars that TensorBoard and Weights & Biases receive, with Megatron-LM's names."""

from __future__ import annotations

from dataclasses import asdict

from gptpar.config.sections.logging import LoggingFlags
from gptpar.reporting.records import IterationRecord, TaskRecord, ValidationRecord

SAMPLES_SUFFIX = " vs samples"
"""The end of the name of a curve over samples."""

# As Megatron-LM does, these are written a second time over consumed samples.
VERSUS_SAMPLES = frozenset(
    {
        "learning-rate",
        "batch-size",
        "lm loss",
        "loss-scale",
        "world-size",
        "grad-norm",
        "num-zeros",
        "params-norm",
        "lm loss validation",
        "lm loss validation ppl",
        "lm loss test",
        "lm loss test ppl",
    }
)


def iteration_scalars(record: IterationRecord, options: LoggingFlags, world_size: int) -> dict[str, float]:
    """The scalars of one iteration by name, without those that have no value; ``iteration-time`` is in seconds."""
    values: dict[str, float | None] = {
        "learning-rate": record.learning_rate if options.log_learning_rate_to_tensorboard else None,
        "skipped-train-samples": record.skipped_samples or None,
        "batch-size": record.global_batch_size if options.log_batch_size_to_tensorboard else None,
        "lm loss": record.lm_loss,
        "restarts": record.restarts or None,
        **record.auxiliary_losses,
        "loss-scale": record.loss_scale if options.log_loss_scale_to_tensorboard else None,
        "world-size": world_size if options.log_world_size_to_tensorboard else None,
        "grad-norm": record.grad_norm,
        "num-zeros": record.num_zeros,
        "params-norm": record.params_norm,
        "outlier-iterations": record.num_outliers,
        **record.layer_norms,
    }
    if options.log_memory_to_tensorboard:
        memory = asdict(record.memory) if record.memory else {}
        values |= {f"mem-{name.replace('_', '-')}": value for name, value in memory.items()}
        values["mem-host-bytes"] = record.host_bytes
    if options.log_timers_to_tensorboard:
        values |= _time_scalars(record)
    return {name: value for name, value in values.items() if value is not None}


def _time_scalars(record: IterationRecord) -> dict[str, float | None]:
    cpu = record.cpu_optimizer
    of_cpu: dict[str, float | None] = {}
    if cpu is not None:
        of_cpu = {"cpu-optimizer-wait-time": cpu.waited / 1000, "cpu-optimizer-busy-time": cpu.busy / 1000}
    return of_cpu | {
        "iteration-time": record.elapsed_ms / 1000,
        "throughput": record.tflops_per_gpu,
        "tokens-per-second": record.tokens_per_s,
        "mfu": record.mfu,
        "mfu-causal": record.mfu_causal,
    }


def validation_scalars(record: ValidationRecord, options: LoggingFlags) -> dict[str, float]:
    """The scalars of one evaluation by name."""
    values = {f"lm loss {record.split}": record.loss}
    if options.log_validation_ppl_to_tensorboard:
        values[f"lm loss {record.split} ppl"] = record.perplexity
    return values


def task_scalars(record: TaskRecord) -> dict[str, float]:
    """A task's scores by name, ``TASK/acc`` and so on, without their standard errors, and the seconds they took."""
    scores = {name: value for name, value in record.scores.items() if not name.endswith("_stderr")}
    return {f"{record.task}/{name}": value for name, value in (scores | {"seconds": record.seconds}).items()}
