"""The keys of a DeepSpeed configuration, and what each becomes here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gptpar.config.compat import ALWAYS, BUCKETS, COLLECTIVES


@dataclass(frozen=True)
class Sets:
    """The key says a field of the configuration, or several with a list.

    Attributes:
        read: turns the JSON value into the field's; a ``ValueError`` says what is needed instead.
        fields: as ``section.field``.
        why: what a reader of the banner should know.
    """

    read: Callable[[Any], Any]
    fields: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class NoEffect:
    """The key is understood, and nothing depends on it; ``inside``: the keys it may hold, if it is an object."""

    why: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Only:
    """The key may have these values, which change nothing; ``why`` no other can be had, and what to do."""

    values: tuple[object, ...]
    why: str


@dataclass(frozen=True)
class Absent:
    """What the key turns on is not there; off it is accepted, whatever else it says."""

    what: str


@dataclass(frozen=True)
class Elsewhere:
    """The key is known and read elsewhere, or belongs to something that is not read."""


Rule: TypeAlias = Sets | NoEffect | Only | Absent | Elsewhere
Tree: TypeAlias = "Mapping[str, Rule | Tree]"


def whole(value: Any) -> int:
    """A whole number, which may be written as 5e8."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1 != 0 or abs(value) >= 2**63:
        raise ValueError("a whole number is needed")
    return int(value)


def number(value: Any) -> float:
    """Any number that a float can hold; JSON writes others, too."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError("a number is needed")
    return float(value)


def truth(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise ValueError("true or false is needed")
    return value


def word_of(meanings: Mapping[str, Any]) -> Callable[[Any], Any]:
    """A reader of one of these words."""

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in meanings:
            raise ValueError(f"one of {', '.join(meanings)} is needed")
        return meanings[value]

    return read


def _betas(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("two numbers in brackets are needed")
    return [number(beta) for beta in value]


def _scale_of_power(value: Any) -> float:
    if not 0 <= whole(value) <= 127:
        raise ValueError("a whole number from 0 to 127 is needed")
    return 2.0 ** whole(value)


def _share(value: Any) -> float:
    if not 0 <= number(value) <= 1:
        raise ValueError("a number from 0 to 1 is needed")
    return number(value)


def _parameters_on_cpu(value: Any) -> bool:
    if value == "nvme":
        raise ValueError('parameters on NVMe are not part of this version yet; "cpu" and "none" are')
    return word_of({"none": False, "cpu": True})(value)


def _folder(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("the path of a folder is needed")
    return value


def _linear(value: Any) -> None:
    if value != "linear":
        raise ValueError(
            'the warm-up is linear here; set it to "linear", or leave scheduler out and give --lr-warmup-iters and '
            "--lr-decay-style"
        )


def _warmup_steps(value: Any) -> int:
    return max(2, whole(value))  # so does DeepSpeed


def _twice(value: Any) -> list[float]:
    return [number(value)] * 2


FP32_STATE = "master weights, moments and gradient sums are always fp32: leave it out"
MEASURED = "iteration time and throughput are always measured; see gptpar benchmark --breakdown"
RECOMPUTE = "see --recompute-granularity, --partition-activations and --checkpoint-in-cpu"
PINNED = "host memory that a GPU reads or writes is always pinned"
NVME = "the operating system reads ahead and writes back"
MONITOR = ("enabled", "output_path", "job_name")

OPTIMIZER: Tree = {
    "lr": Sets(number, ("optimizer.lr",)),
    "betas": Sets(_betas, ("optimizer.adam_beta1", "optimizer.adam_beta2")),
    "eps": Sets(number, ("optimizer.adam_eps",)),
    "weight_decay": Sets(number, ("optimizer.weight_decay",), "of matrices, not of biases and norms"),
    "max_grad_norm": Sets(number, ("optimizer.clip_grad",)),
    "adam_w_mode": Sets(truth, ()),
    "torch_adam": NoEffect("the fused kernels are chosen here"),
    "set_grad_none": NoEffect("gradients have one place in memory"),
    "amsgrad": Only((False,), "AMSGrad is not part of gptpar: leave it out"),
    "bias_correction": Only((True,), "Adam's bias correction is always on: leave it out"),
    "fp32_optimizer_states": Only((True,), FP32_STATE),
}

_ADAM_ONLY = ("eps", "adam_w_mode", "torch_adam", "amsgrad", "bias_correction")
OPTIMIZER_SECTIONS: Mapping[str, Tree] = {
    "lion": {
        "type": Sets(lambda _: "lion", ("optimizer.optimizer",)),
        "params": {
            **{name: rule for name, rule in OPTIMIZER.items() if name not in _ADAM_ONLY},
            "betas": Sets(_betas, ("optimizer.lion_beta1", "optimizer.lion_beta2")),
        },
    },
}
"""The keys of ``optimizer`` by its type in small letters, where they are not AdamW's."""

FP16: Tree = {
    "enabled": Sets(truth, ("precision.fp16",)),
    "loss_scale": Sets(lambda value: number(value) or None, ("precision.loss_scale",)),
    "initial_scale_power": Sets(_scale_of_power, ("precision.initial_loss_scale",)),
    "loss_scale_window": Sets(whole, ("precision.loss_scale_window",)),
    "hysteresis": Sets(whole, ("precision.hysteresis",)),
    "min_loss_scale": Sets(number, ("precision.min_loss_scale",)),
    "consecutive_hysteresis": Only((False,), "the hysteresis is restored when the scale doubles: leave it out"),
    "auto_cast": Only((False,), "weights and activations are fp16 themselves: leave it out"),
    "fp16_master_weights_and_grads": Only((False,), FP32_STATE),
}

BF16: Tree = {
    "enabled": Sets(truth, ("precision.bf16",)),
    "immediate_grad_update": NoEffect("gradients are always added to their fp32 sums at once"),
    "check_grad_overflow": NoEffect("a step whose gradient is not finite is always skipped and counted"),
    "bf16_master_weights_and_grads": Only((False,), FP32_STATE),
    "bf16_optimizer_states": Only((False,), FP32_STATE),
}

OFFLOAD_OPTIMIZER: Tree = {
    "device": Sets(word_of({"none": False, "cpu": True, "nvme": True}), ("offload.cpu_optimizer",)),
    "nvme_path": Sets(_folder, ("offload.optimizer_nvme_path",)),
    "ratio": Sets(
        _share, ("offload.cpu_optimizer_ratio",), "exact here: this share of the elements, at every ZeRO stage"
    ),
    "pin_memory": NoEffect(PINNED),
    "cpuadam_cores_perc": NoEffect("see --cpu-optimizer-threads"),
    "super_offload": NoEffect("see --offload-speculation"),
    **dict.fromkeys(("buffer_count", "pipeline_read", "pipeline_write", "pipeline", "fast_init"), NoEffect(NVME)),
}

OFFLOAD_PARAM: Tree = {
    "device": Sets(_parameters_on_cpu, ("offload.cpu_parameters",)),
    "pin_memory": NoEffect(PINNED),
    **dict.fromkeys(("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"), NoEffect("layers come one by one")),
}

_STAGE3_NUMBERS = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "module_granularity_threshold",
)

ZERO: Tree = {
    "stage": Sets(whole, ("parallel.zero_stage",)),
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "offload_param": OFFLOAD_PARAM,
    "cpu_offload": Sets(truth, ("offload.cpu_optimizer",)),
    "cpu_offload_params": Sets(truth, ("offload.cpu_parameters",)),
    "cpu_offload_use_pin_memory": NoEffect(PINNED),
    "contiguous_gradients": NoEffect(ALWAYS),
    "load_from_fp32_weights": NoEffect(ALWAYS),
    "ignore_unused_parameters": NoEffect("every parameter of a GPT is used"),
    "sub_group_size": NoEffect("the optimizer's pieces are chosen here"),
    "gather_16bit_weights_on_model_save": NoEffect("checkpoints load into any layout"),
    "stage3_gather_16bit_weights_on_model_save": NoEffect("checkpoints load into any layout"),
    "stage3_gather_fp16_weights_on_model_save": NoEffect("checkpoints load into any layout"),
    "use_multi_rank_bucket_allreduce": NoEffect(COLLECTIVES),
    **dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), NoEffect(BUCKETS)),
    **dict.fromkeys((f"{start}{name}" for start in ("", "stage3_") for name in _STAGE3_NUMBERS), NoEffect(BUCKETS)),
    **dict.fromkeys(
        ("reduce_scatter", "overlap_comm", "allgather_partitions", "round_robin_gradients"), NoEffect(COLLECTIVES)
    ),
    **dict.fromkeys(("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"), NoEffect(COLLECTIVES)),
    "elastic_checkpoint": NoEffect("checkpoints load into any layout"),
    "zenflow": Absent("ZenFlow"),
    "zero_hpz_partition_size": Only((0, 1), "a second partition within a node is not part of gptpar: leave it out"),
    "mics_shard_size": Only((-1, 0), "MiCS is not part of gptpar: leave it out"),
    "mics_hierarchical_params_gather": Absent("MiCS"),
    **dict.fromkeys(
        ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
        Absent("quantized communication (ZeRO++)"),
    ),
}

_WARMUP: Tree = {
    "warmup_num_steps": Sets(
        _warmup_steps, ("optimizer.lr_warmup_iters",), "DeepSpeed's own warm-up runs one step behind this one"
    ),
    "warmup_type": Sets(_linear, ()),
}
_TOTAL: Tree = {"total_num_steps": Sets(whole, ("optimizer.lr_decay_iters",))}
SCHEDULES: Mapping[str, Tree] = {
    "WarmupLR": {
        **_WARMUP,
        "warmup_min_lr": Sets(number, ("optimizer.lr_warmup_init",)),
        "warmup_max_lr": Sets(number, ("optimizer.lr",)),
    },
    "WarmupDecayLR": {
        **_WARMUP,
        **_TOTAL,
        "warmup_min_lr": Sets(_twice, ("optimizer.lr_warmup_init", "optimizer.min_lr")),
        "warmup_max_lr": Sets(number, ("optimizer.lr",)),
    },
    "WarmupCosineLR": {**_WARMUP, **_TOTAL, "warmup_min_ratio": Sets(number, ()), "cos_min_ratio": Sets(number, ())},
}
"""What ``scheduler.params`` holds, by ``scheduler.type``. DeepSpeed's scheduler takes its first step after the
optimizer's: its warm-up runs one step behind its formula, which is ours (the first two steps have the initial rate)."""


def style(value: Any) -> str:
    """The decay of a ``scheduler.type``."""
    styles = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    if not isinstance(value, str) or value not in styles:
        raise ValueError(
            f"only {', '.join(styles)} have an equal here; leave scheduler out and give --lr-decay-style, "
            "--lr-warmup-iters, --lr-decay-iters and --min-lr"
        )
    return styles[value]


DEFAULTS_SINCE = {
    "gradient_clipping": (
        " since its 0.19.3 (change of June 2026); before that it did not clip: write 0.0 to do as it did then"
    )
}
"""Defaults that changed: which DeepSpeed's they are."""

SCHEDULE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-3, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupCosineLR": {
        "warmup_min_ratio": 0.0,
        "cos_min_ratio": 1e-4,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
}

KEYS: Tree = {
    "train_batch_size": Sets(whole, ("batch.global_batch_size",)),
    "train_micro_batch_size_per_gpu": Sets(whole, ("batch.micro_batch_size",)),
    "gradient_accumulation_steps": Sets(whole, ("batch.gradient_accumulation_steps",)),
    "gradient_clipping": Sets(number, ("optimizer.clip_grad",)),
    "steps_per_print": Sets(whole, ("logging.log_interval",)),
    "communication_data_type": Sets(
        word_of({"fp32": False, "bf16": True}), ("parallel.grad_reduce_in_bf16",), "the sum is kept in fp32"
    ),
    "optimizer": {"type": Sets(str, ()), "params": OPTIMIZER, "legacy_fusion": NoEffect("there is one fused kernel")},
    "scheduler": Elsewhere(),
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "zero_optimization": ZERO,
    "data_types": {"grad_accum_dtype": NoEffect("gradients are always summed in fp32")},
    "prescale_gradients": NoEffect("the loss is divided before the backward pass"),
    "gradient_predivide_factor": NoEffect("the loss is divided before the backward pass"),
    "wall_clock_breakdown": NoEffect(MEASURED),
    "memory_breakdown": NoEffect("see gptpar plan and --log-memory-to-tensorboard"),
    "dump_state": NoEffect("the start banner shows the configuration"),
    "zero_allow_untested_optimizer": NoEffect("the optimizer is gptpar's, with every ZeRO stage"),
    "zero_force_ds_cpu_optimizer": NoEffect("the CPU optimizer is gptpar's"),
    "disable_allgather": NoEffect(COLLECTIVES),
    "activation_checkpointing": NoEffect(
        RECOMPUTE,
        (
            "partition_activations",
            "cpu_checkpointing",
            "contiguous_memory_optimization",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        ),
    ),
    "tensorboard": NoEffect("see --tensorboard-dir", MONITOR),
    "csv_monitor": NoEffect("SAVE/metrics.jsonl is always written", MONITOR),
    "wandb": NoEffect("see --wandb-project", ("enabled", "group", "team", "project")),
    "comet": NoEffect(
        "see --tensorboard-dir and --wandb-project",
        ("enabled", "samples_log_interval", "project", "workspace", "api_key", "experiment_name", "experiment_key")
        + ("online", "mode"),
    ),
    "flops_profiler": NoEffect(
        MEASURED,
        ("enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file", "recompute_fwd_factor"),
    ),
    "pipeline": NoEffect(
        "see --pipeline-model-parallel-size and --partition-method",
        ("stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned")
        + ("grad_partitioned", "use_reentrant"),
    ),
    "checkpoint": NoEffect(
        "checkpoints load into any layout; see --save and --load",
        ("tag_validation", "load_universal", "use_node_local_storage", "parallel_write", "writer"),
    ),
    "aio": NoEffect(
        NVME,
        ("block_size", "queue_depth", "intra_op_parallelism", "thread_count", "single_submit", "overlap_events")
        + ("use_gds",),
    ),
    "compile": NoEffect("see --no-compile", ("enabled", "backend", "kwargs", "deepcompile", "offload_activation")),
    "sparse_gradients": Absent("sparse gradients"),
    "amp": Absent("Apex"),
    "elasticity": Absent("elastic training"),
    "autotuning": Absent("DeepSpeed's autotuning (see gptpar plan --search)"),
    "curriculum_learning": Absent("curriculum learning"),
    "data_efficiency": Absent("curriculum learning and data routing"),
    "compression_training": Absent("compression"),
    "quantize_training": Absent("quantized training"),
    "progressive_layer_drop": Absent("progressive layer dropping"),
    "sparse_attention": Absent("sparse attention"),
    "eigenvalue": Absent("the eigenvalue estimate"),
    "hybrid_engine": Absent("the hybrid engine"),
    "tensor_parallel": Absent("tensor parallelism by this file (see --tensor-model-parallel-size)"),
    "sequence_parallel_size": Only((1,), "context parallelism is not part of this version yet: leave it out"),
}
