"""Flags of evaluation, the console, logs (TensorBoard, CSV, Weights & Biases), and of what is watched and skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias

from gptpar.config.fields import NEVER, Open, flag, on_unless

EVAL_INTERVAL = 1000
"""Steps between evaluations, unless --eval-interval says them."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig(Generic[Open]):
    """Evaluation and what is written where."""

    eval_iters: int = flag(100, "global batches in one evaluation; 0 is none", least=0)
    full_validation: bool = flag(
        False,
        "evaluate on the whole validation set each time, each sample once, regardless of --eval-iters (the set is "
        "--valid-data-path, or validation's share of --data-path; several corpora count as one, without weights)",
    )
    skip_train: bool = flag(False, "evaluate the loaded checkpoint and stop")
    eval_tasks: tuple[str, ...] | None = flag(
        None,
        ".jsonl files of questions with choices (HellaSwag's, ARC's or PIQA's fields, or query, choices, gold) or of "
        "texts (text), to evaluate during the run: accuracy, or bits per byte (docs/evaluation.md)",
        metavar="FILE",
    )
    eval_limit: int | None = flag(
        None, "evaluate this many items of each of these files, drawn by a fixed seed (default: all)", least=1
    )
    eval_tasks_interval: int | None = flag(
        None, "steps between evaluations on --eval-tasks (default: --eval-interval)", least=1
    )
    log_interval: int = flag(100, "steps between console lines", least=1)
    timing_log_level: int = flag(0, "from 1 on, log how long the parts of an iteration took", least=0)
    log_throughput: bool = flag(False, "add TFLOP/s per GPU to the console line")
    log_lines: str = flag(
        "short",
        "console lines: short ones for people, or Megatron-LM's, for programs that read them",
        choices=("short", "megatron"),
    )
    log_params_norm: bool = flag(False, "compute and log the L2 norm of the parameters")
    log_num_zeros_in_grad: bool = flag(False, "count and log zeros in the gradient")
    tensorboard_dir: str | None = flag(None, "TensorBoard folder (default: SAVE/tensorboard)")
    tensorboard_log_interval: int = flag(1, "steps between TensorBoard points", least=1)
    tensorboard_queue_size: int = flag(1000, "TensorBoard events held before a flush", least=1)
    log_timers_to_tensorboard: bool = flag(False, "chart iteration time and throughput")
    log_batch_size_to_tensorboard: bool = flag(False, "chart the global batch size")
    log_validation_ppl_to_tensorboard: bool = flag(False, "chart the validation perplexity")
    log_memory_to_tensorboard: bool = flag(False, "chart GPU memory")
    log_world_size_to_tensorboard: bool = flag(False, "chart the number of processes")
    log_loss_scale_to_tensorboard: bool = on_unless("--no-log-loss-scale-to-tensorboard", "do not chart the loss scale")
    log_learning_rate_to_tensorboard: bool = on_unless(
        "--no-log-learnig-rate-to-tensorboard", "do not chart the learning rate"
    )
    csv_dir: str | None = flag(
        None,
        "folder of CSV files: loss, learning rate and loss scale over samples, as DeepSpeed's csv_monitor writes them",
    )
    wandb_project: str | None = flag(None, "also log to this Weights & Biases project", names=("--wandb-project-name",))
    wandb_exp_name: str | None = flag(None, "name of the Weights & Biases run", names=("--wandb-name",))
    wandb_entity: str | None = flag(
        None, "team or user of Weights & Biases that the project belongs to", names=("--wandb-entity-name",)
    )
    wandb_group: str | None = flag(None, "group of Weights & Biases runs that this one belongs to")
    wandb_save_dir: str | None = flag(None, "folder of Weights & Biases' own files (default: SAVE)")
    eval_interval: int | Open = flag(
        None,
        f"steps between evaluations on validation data (default: {EVAL_INTERVAL})",
        least=1,
        most=NEVER,
        complete=EVAL_INTERVAL,
    )

    @property
    def draws_curves(self) -> bool:
        """Whether a folder or a project for curves is named."""
        return (self.csv_dir, self.tensorboard_dir, self.wandb_project) != (None, None, None)


LoggingFlags: TypeAlias = LoggingConfig[None]


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Numbers that go wrong: outliers, replicas, norms of layers."""

    skip_step_sigma: float | None = flag(
        None,
        "skip steps whose loss or gradient norm is more than X standard deviations above the mean of the last steps "
        "(OLMo: 6; default: off); weights and moments stay as they are, the schedules go on",
        above=0,
    )
    skip_step_window: int = flag(128, "number of steps in that mean; no step is skipped before half of them", least=2)
    spike_bundle: bool = on_unless(
        "--no-spike-bundle", "do not write the batch and the norms of the first 10 skipped outliers to SAVE/spikes"
    )
    check_replicas_interval: int | None = flag(
        None,
        "steps between comparisons of the weights that several processes hold, bit for bit; a difference ends the run",
        least=1,
        names=("--check-weight-hash-across-dp-replicas-interval",),
    )
    log_layer_norms_interval: int | None = flag(
        None,
        "steps between records of each layer's norms: of its output (root of the mean square), gradient and update; "
        "such a step takes a further forward pass and a copy of the master weights in host memory",
        least=1,
    )
