"""Processes, checkpoints and what a run shows."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config.fields import flag


@dataclass(frozen=True)
class ParallelConfig:
    """How many processes share the work, and how."""

    tensor_model_parallel_size: int = flag(1, "processes that split each layer", least=1, most=1_000_000)
    sequence_parallel: bool = flag(False, "split the tokens between layers over the tensor-parallel processes, too")
    tp_comm_overlap: bool = flag(
        True,
        "do not overlap tensor-parallel communication with matrix products through symmetric memory",
        off="--no-tp-comm-overlap",
    )
    pipeline_model_parallel_size: int = flag(1, "processes that split the stack of layers", least=1, most=1_000_000)
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "interleaved pipeline: blocks in each of a process's chunks", least=1, most=10_000
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "interleaved pipeline: chunks of layers that each process holds (default: 1)", least=1, most=10_000
    )
    pipeline_partition_method: str = flag(
        "parameters",
        "where the stack is cut: parameters, flops, uniform, type:REGEX of a layer's class, or boundaries as 0,7,14",
        names=("--partition-method",),
    )
    no_pipeline_parallel: bool = flag(False, "never split the stack of layers")
    zero_stage: int | None = flag(
        None,
        "what the data-parallel processes share out: 1 the optimizer, 2 and gradients, 3 and parameters (default: 3 "
        "with --no-pipeline-parallel, 1 with --use-distributed-optimizer, else 0)",
        least=0,
    )
    use_distributed_optimizer: bool = flag(False, "same as --zero-stage 1")
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients over data-parallel processes in bf16 instead of fp32")
    nproc_per_node: int | None = flag(
        None,
        "workers to start on this machine without torchrun (default: one a visible GPU, else one)",
        least=1,
        most=1_000,
    )
    distributed_backend: str | None = flag(None, "default: nccl on GPUs, gloo on CPUs", choices=("nccl", "gloo"))
    distributed_timeout_minutes: float = flag(
        10, "a collective that takes longer ends the run", above=0, most=1_000_000
    )

    @property
    def model_parallel_size(self) -> int:
        """Processes that together hold the model once."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def num_chunks(self) -> int:
        """Chunks of consecutive layers that each process holds; more than one is an interleaved pipeline."""
        return self.num_virtual_stages_per_pipeline_rank or 1

    def data_parallel_size(self, world_size: int) -> int:
        """How often ``world_size`` processes hold the model; at least 1, also where they do not suffice for that."""
        return max(1, world_size // max(1, self.model_parallel_size))


@dataclass(frozen=True)
class CheckpointConfig:
    """Where a run is saved and resumed from."""

    save: str | None = flag(None, "run folder: checkpoints, metrics.jsonl and TensorBoard files, of one run at a time")
    load: str | None = flag(None, "folder to resume from (its newest good checkpoint)")
    save_interval: int | None = flag(None, "steps between checkpoints (the last step is always saved)", least=1)
    keep_checkpoints: int | None = flag(None, "keep only this many of this run's newest checkpoints", least=1)
    no_save_optim: bool = flag(False, "save weights without the optimizer's moments")
    no_load_optim: bool = flag(False, "load weights without the optimizer's moments")
    finetune: bool = flag(False, "load weights only; start at iteration 0 with a fresh schedule and data order")
    ckpt_step: int | None = flag(
        None, "load this iteration instead of the newest; saving in that folder moves later ones to a branch", least=0
    )
    exit_on_missing_checkpoint: bool = flag(False, "stop when --load holds no checkpoint instead of starting afresh")


@dataclass(frozen=True)
class LoggingConfig:
    """Evaluation and what is written where."""

    eval_interval: int | None = flag(None, "steps between evaluations on validation data (default: 1000)", least=1)
    eval_iters: int = flag(100, "global batches in one evaluation; 0 is none", least=0)
    full_validation: bool = flag(
        False,
        "evaluate on the whole validation set each time, each sample once, however many --eval-iters there are (of "
        "--valid-data-path, or of validation's share of --data-path; several corpora count as one, without weights)",
    )
    skip_train: bool = flag(False, "evaluate the loaded checkpoint and stop")
    log_interval: int = flag(100, "steps between console lines", least=1)
    timing_log_level: int = flag(0, "from 1 on: what the time of an iteration was spent waiting for", least=0)
    log_throughput: bool = flag(False, "add TFLOP/s per GPU to the console line")
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
    log_loss_scale_to_tensorboard: bool = flag(
        True, "do not chart the loss scale", off="--no-log-loss-scale-to-tensorboard"
    )
    log_learning_rate_to_tensorboard: bool = flag(
        True, "do not chart the learning rate", off="--no-log-learnig-rate-to-tensorboard"
    )
    wandb_project: str | None = flag(None, "also log to this Weights & Biases project")
    wandb_exp_name: str | None = flag(None, "name of the Weights & Biases run")


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A DeepSpeed configuration that says what the command line leaves open."""

    deepspeed: bool = flag(False, "read --deepspeed_config: what it says means here what it means to DeepSpeed")
    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed's JSON, comments and trailing commas allowed: batch sizes, optimizer, schedule, clipping, number "
        "format, ZeRO stage and optimizer offload; a flag that contradicts it is a problem",
        names=("--deepspeed_config",),
        metavar="FILE",
    )
