"""Batches, duration, optimizer, schedule and precision."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config.fields import flag

MEASURED_STEPS = 10
"""Steps after which ``--train-minutes`` fixes the length of a run. The first of them also warms up and is not timed."""

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")


@dataclass(frozen=True)
class BatchConfig:
    """How much is trained on in a step, and for how long."""

    micro_batch_size: int | None = flag(None, "samples one process runs at once", least=1, most=1_000_000)
    global_batch_size: int | None = flag(
        None, "samples in one step, over all processes (default: micro x processes)", least=1, most=100_000_000
    )
    gradient_accumulation_steps: int | None = flag(
        None,
        "micro-batches in one step of a process; with any two of global batch, micro-batch and this the third follows",
        least=1,
        most=100_000_000,
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None,
        "grow the global batch from START by INCREMENT up to --global-batch-size over SAMPLES samples",
        metavar="START INCREMENT SAMPLES",
        most=10**13,
    )
    step_batch_size_schedule: tuple[str, ...] | None = flag(
        None,
        "change the global batch at these numbers of tokens (K, M, B, T: thousands to trillions); the first is 0, the "
        "last SIZE is the --global-batch-size; for example 0:16 2.4B:320 4.8B:624",
        metavar="TOKENS:SIZE",
    )
    train_iters: int | None = flag(None, "train for this many steps", least=1, most=10**10)
    train_samples: int | None = flag(None, "train on this many samples", least=1, most=10**13)
    train_tokens: int | None = flag(
        None,
        "train on this many tokens; beside --train-samples or --train-iters, what is reached first ends the run",
        least=1,
        most=10**17,
    )
    train_minutes: float | None = flag(
        None,
        "after ten steps, lower --train-iters to the number of steps that fit into this many minutes of training; the "
        "schedule follows, a checkpoint keeps the number, and the data stay those of --train-iters",
        above=0,
    )
    train_iters_needed: int | None = flag(
        None,
        "say so if fewer steps than this fit into --train-minutes: too few to learn more than frequencies",
        least=1,
    )
    exit_interval: int | None = flag(None, "save and stop after an iteration divisible by this", least=1)
    exit_duration_in_mins: float | None = flag(None, "save and stop after this many minutes", above=0)

    batch_sizes: tuple[tuple[int, int], ...] | None = None
    """--step-batch-size-schedule in samples: (first sample, batch from there on); filled with the sequence length."""
    sample_limit: int | None = None
    """--train-tokens in samples; filled with the sequence length."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer with decoupled weight decay, its schedules and gradient clipping."""

    optimizer: str = flag(
        "adam",
        "adam is AdamW, lion has one state vector and no fused kernel; both decouple the weight decay",
        choices=("adam", "lion"),
    )
    lr: float | None = flag(None, "peak learning rate", least=0)
    min_lr: float = flag(0.0, "the schedule never goes below this after warm-up")
    lr_decay_style: str = flag("linear", "shape of the decay", choices=DECAY_STYLES)
    lr_decay_iters: int | None = flag(None, "steps until --min-lr (default: the whole run)", least=1)
    lr_decay_samples: int | None = flag(None, "samples until --min-lr (default: the whole run)", least=1)
    lr_decay_tokens: int | None = flag(None, "tokens until --min-lr", least=1)
    lr_warmup_fraction: float | None = flag(None, "share of the decay span spent warming up")
    lr_warmup_iters: int = flag(0, "steps of linear warm-up", least=0)
    lr_warmup_samples: int = flag(0, "samples of linear warm-up", least=0)
    lr_warmup_tokens: int | None = flag(None, "tokens of linear warm-up", least=0)
    lr_warmup_init: float = flag(0.0, "learning rate at the start of the warm-up")
    lr_wsd_decay_style: str = flag(
        "exponential", "shape of WSD's tail", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "length of WSD's tail in steps", least=1)
    lr_wsd_decay_samples: int | None = flag(None, "length of WSD's tail in samples", least=1)
    weight_decay: float = flag(0.01, "decoupled weight decay (matrices only; not biases, not norms)", least=0)
    start_weight_decay: float | None = flag(None, "weight decay at the start (with --weight-decay-incr-style)", least=0)
    end_weight_decay: float | None = flag(None, "weight decay at the end", least=0)
    weight_decay_incr_style: str = flag(
        "constant", "how the weight decay grows", choices=("constant", "linear", "cosine")
    )
    clip_grad: float = flag(1.0, "clip the global L2 norm of the gradient to this; 0 is off", least=0)
    adam_beta1: float = flag(0.9, "decay of the first moment")
    adam_beta2: float = flag(0.999, "decay of the second moment")
    adam_eps: float = flag(1e-8, "added to the square root of the second moment", above=0)
    lion_beta1: float = flag(0.9, "weight of the momentum in the sign that is the update")
    lion_beta2: float = flag(0.99, "decay of the momentum")
    override_opt_param_scheduler: bool = flag(
        False,
        "on resume, let this command line's schedule replace the checkpoint's",
        names=("--override-opt_param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "on resume, let the checkpoint's schedule replace this command line's",
        names=("--use-checkpoint-opt_param-scheduler",),
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. Master weights, moments and gradient sums are always fp32 (fp64 with --fp64)."""

    fp16: bool = flag(False, "16-bit floats with a dynamic loss scale")
    bf16: bool = flag(False, "bfloat16 weights and activations")
    fp64: bool = flag(False, "64-bit floats throughout, for checks of exactness")
    loss_scale: float | None = flag(None, "constant loss scale for --fp16 (default: dynamic)", above=0)
    initial_loss_scale: float = flag(2.0**32, "where the dynamic loss scale starts")
    min_loss_scale: float = flag(1.0, "the dynamic loss scale stops the run below this", above=0)
    loss_scale_window: int = flag(1000, "good steps before the loss scale doubles", least=1)
    hysteresis: int = flag(2, "overflows tolerated before the loss scale halves", least=1)
    compile: bool = flag(True, "do not compile the blocks (compiling is on only on GPUs)", off="--no-compile")
    cuda_graph: str = flag(
        "auto",
        "launch forward and backward of a step as one CUDA graph (auto: on GPUs, where nothing speaks against it); "
        "with --cpu-optimizer, on one process only, in parts, between which the host waits and takes gradients",
        choices=("auto", "on", "off"),
    )

    @property
    def dtype(self) -> str:
        """``"fp16"``, ``"bf16"``, ``"fp64"`` or ``"fp32"``."""
        return next((name for name in ("fp16", "bf16", "fp64") if getattr(self, name)), "fp32")


@dataclass(frozen=True)
class RecomputeConfig:
    """Activation checkpointing: forget activations and compute them again in the backward pass."""

    recompute_granularity: str | None = flag(
        None, "what is recomputed: whole blocks, or parts of each block", choices=("full", "selective")
    )
    recompute_activations: bool = flag(False, "same as --recompute-granularity selective")
    recompute_method: str | None = flag(
        None,
        "whole blocks: all of them in groups of --recompute-num-layers, or only the first N of each pipeline stage",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None,
        "uniform: blocks recomputed together (default: 1); else: recompute only the first N blocks of each pipeline "
        "stage (default: all)",
        least=1,
    )
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "parts recomputed by --recompute-granularity selective (default: core_attn)",
        choices=("core_attn", "mlp", "layernorm"),
    )
    checkpoint_activations: bool = flag(False, "same as --recompute-granularity full")
    checkpoint_num_layers: int | None = flag(
        None, "same as --recompute-method uniform --recompute-num-layers N", least=1
    )
    distribute_saved_activations: bool = flag(
        False,
        "split the saved inputs of recomputed blocks between the tensor-parallel processes",
        names=("--partition-activations",),
    )
    checkpoint_in_cpu: bool = flag(False, "keep the saved inputs of recomputed blocks in host memory")
