"""The table of DeepSpeed's keys: the meaning of each key to ``gptpar pretrain`` and to ``gptpar.initialize``.

A row is a key's path, its rule on the command line, its rule for an engine if that differs, the optimizers or
schedules whose section has the key, and DeepSpeed's default if gptpar's own differs. Everything else follows from the
table: unknown keys, refused keys with their reasons, and keys that the banner names as without effect. The rows of keys
that set nothing are in ``deepspeed_keys.toml``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gptpar.config.deepspeed_optimizers import FP32_STATE, OPTIMIZER, OPTIMIZERS
from gptpar.config.deepspeed_rules import (
    OFF,
    Absent,
    Door,
    Key,
    NoEffect,
    NotRead,
    Only,
    Rule,
    Sets,
    Tree,
    asks_for_parallelism,
    asks_for_routing,
    asks_for_sparsity,
    class_names,
    if_enabled,
    if_true,
    interval,
    monitor_folder,
    number,
    one_rate,
    parameters_on_cpu,
    partition,
    positive,
    rates,
    scale_of_power,
    share,
    switch,
    tag_validation,
    text,
    true_in_words,
    truth,
    wandb_words,
    whole,
    word_of,
)
from gptpar.system.files import facts_in

WARMUPS = ("warmuplr", "warmupdecaylr", "warmupcosinelr")
SCHEDULE_TYPES = {name.lower(): name for name in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle")}
SCHEDULE_TYPES |= {"lrrangetest": "LRRangeTest"}
TYPES: Mapping[str, tuple[str, ...]] = {"optimizer": OPTIMIZERS, "scheduler": tuple(SCHEDULE_TYPES)}
"""Section whose keys depend on its type -> the types."""

FORMATS = {name: name for name in ("fp32", "fp16", "bf16")}

DEFAULTS_SINCE = {
    "gradient_clipping": (
        " since its 0.19.3 (change of June 2026); before that it did not clip: write 0.0 to do as it did then"
    )
}
"""Key whose default has changed between DeepSpeed's versions -> a remark about the version."""

_MEASURED = "iteration time and throughput are always measured; see gptpar benchmark --breakdown"
_TIMES = NoEffect("the engine measures nothing: time your loop")
_NVME = NoEffect("the operating system reads ahead and writes back")
_FALSE = (False,)
IGNORED = "DeepSpeed has no such key, and ignores it"
_SCHEDULE_WORDS = {name: name for name in SCHEDULE_TYPES.values()}
_NO_SCHEDULE = f"only {', '.join(SCHEDULE_TYPES.values())} can be made from a configuration; "
_MONITOR = "enabled output_path job_name"
_PIPELINE = NoEffect("see --pipeline-model-parallel-size and --partition-method")
_RECOMPUTE = NoEffect("see --recompute-granularity, --partition-activations and --checkpoint-in-cpu")
_OWN_RECOMPUTE = NoEffect("recomputation is the module's own: it stays as it is")


def _schedule_param(name: str, read: Any, of: tuple[str, ...], default: Any = None, why: str = "") -> Key:
    return Key(f"scheduler.params.{name}", Sets(read, f"scheduler.{name}", why), default=default, of=of)


def _rate_param(name: str, of: tuple[str, ...], default: Any = None, why: str = "") -> Key:
    field = f"scheduler.{name}"
    engine = Sets(rates, field, why)
    return Key(f"scheduler.params.{name}", Sets(one_rate, field, why), engine, default, of)


def _same(rule: Rule, prefix: str, names: str, engine: Rule | None = None) -> tuple[Key, ...]:
    """Rows of keys that share a rule."""
    return tuple(Key(prefix + name, rule, engine) for name in names.split())


def _rows_of_file() -> Iterator[Key]:
    """The keys that set nothing, from ``deepspeed_keys.toml``."""
    kinds: dict[str, Callable[[str], Rule]] = {"no_effect": NoEffect, "absent": Absent}
    found: dict[str, dict[str, Rule]] = {}
    for door, tables in facts_in("deepspeed_keys.toml", __file__).items():
        for kind, reasons in tables.items():
            for why, words in reasons.items():
                section = ""
                for word in words.split():
                    if word.endswith(":"):
                        section = f"{word[:-1]}."
                    else:
                        found.setdefault(section + word, {})[door] = kinds[kind](why)
    for path, rules in found.items():
        yield Key(path, rules.get("both") or rules["pretrain"], rules.get("engine"))


# fmt: off
_BATCH = (
    Key("train_batch_size", Sets(whole, "batch.global_batch_size")),
    Key("train_micro_batch_size_per_gpu", Sets(whole, "batch.micro_batch_size")),
    Key("gradient_accumulation_steps", Sets(whole, "batch.gradient_accumulation_steps")),
    Key("gradient_clipping", Sets(number, "optimizer.clip_grad"), default=1.0),
    Key("managed_gradient_accumulation", Only((True,), "a step has gradient_accumulation_steps micro-batches"),
        Sets(truth, "module.managed")),
    Key("steps_per_print", Sets(interval, "logging.log_interval")),
    Key("dataloader_drop_last", NoEffect("every batch is full"), Sets(truth, "module.drop_last")),
    Key("communication_data_type", Sets(word_of({"fp32": False, "fp16": OFF, "bf16": True, "bfp16": True}),
        "parallel.grad_reduce_in_bf16", "the sum is kept in fp32", off="gradients are sent in fp32")),
    Key("gradient_allreduce_op", Only(("mean",), "gradients are the mean over processes: multiply the loss instead"),
        Sets(lambda word: word_of({"mean": OFF, "sum": True})(str(word).lower()), "module.sums_gradients",
        off="gradients are the mean over processes")),
    Key("data_types.grad_accum_dtype", Sets(word_of(dict.fromkeys(FORMATS, OFF)),
        off="gradients are always summed in fp32")),
    Key("data_types.buffer_dtype", Absent("another number format of buffers"),
        Sets(word_of(FORMATS), "module.buffer_dtype")),
    Key("data_types.param_dtype", NoEffect("fp16 and bf16 decide"), Sets(word_of(FORMATS), "module.param_dtype")),
)

_CYCLE, _RANGE = ("onecycle",), ("lrrangetest",)
_SCHEDULER = (
    Key("scheduler.type", Sets(word_of(_SCHEDULE_WORDS, f"{_NO_SCHEDULE}leave scheduler out and give --lr-decay-style, "
        "--lr-warmup-iters, --lr-decay-iters and --min-lr"), "scheduler.type"),
        Sets(word_of(_SCHEDULE_WORDS, f"{_NO_SCHEDULE}pass gptpar.initialize an lr_scheduler, for example a function "
        "from the optimizer to one of torch.optim.lr_scheduler's"), "scheduler.type")),
    Key("scheduler.params.last_batch_iteration", Only((-1,), "a resumed run goes on by its checkpoint: leave it out")),
    _rate_param("warmup_min_lr", WARMUPS[:2], 0.0, "the first two steps have it"),
    _rate_param("warmup_max_lr", WARMUPS[:1]),
    _rate_param("warmup_max_lr", WARMUPS[1:2], 1e-3),
    _schedule_param("warmup_num_steps", whole, WARMUPS, 1000),
    _schedule_param("warmup_type", word_of({"log": "log", "linear": "linear"}), WARMUPS, "log"),
    _schedule_param("total_num_steps", whole, WARMUPS[1:]),
    _schedule_param("warmup_min_ratio", number, WARMUPS[2:], 0.0),
    _schedule_param("cos_min_ratio", number, WARMUPS[2:], 1e-4),
    _schedule_param("cycle_min_lr", number, _CYCLE),
    _schedule_param("cycle_max_lr", number, _CYCLE),
    _schedule_param("decay_lr_rate", number, _CYCLE, 0.0),
    _schedule_param("cycle_first_step_size", positive, _CYCLE, 2000),
    _schedule_param("cycle_second_step_size", positive, _CYCLE),
    _schedule_param("cycle_first_stair_count", whole, _CYCLE, 0),
    _schedule_param("cycle_second_stair_count", whole, _CYCLE),
    _schedule_param("decay_step_size", whole, _CYCLE, 0),
    _schedule_param("cycle_momentum", truth, _CYCLE, True, "both betas are the schedule's"),
    _schedule_param("cycle_min_mom", share, _CYCLE, 0.8),
    _schedule_param("cycle_max_mom", share, _CYCLE, 0.9),
    _schedule_param("decay_mom_rate", number, _CYCLE, 0.0),
    _rate_param("lr_range_test_min_lr", _RANGE, 1e-3),
    _schedule_param("lr_range_test_step_size", positive, _RANGE, 2000),
    _schedule_param("lr_range_test_step_rate", number, _RANGE, 1.0),
    _schedule_param("lr_range_test_staircase", truth, _RANGE, False),
)

_FORMATS = (
    Key("fp16.enabled", Sets(true_in_words, "precision.fp16")),
    Key("fp16.loss_scale", Sets(lambda value: number(value) or None, "precision.loss_scale"), default=0),
    Key("fp16.initial_scale_power", Sets(scale_of_power, "precision.initial_loss_scale"), default=16),
    Key("fp16.loss_scale_window", Sets(whole, "precision.loss_scale_window")),
    Key("fp16.hysteresis", Sets(whole, "precision.hysteresis")),
    Key("fp16.min_loss_scale", Sets(number, "precision.min_loss_scale")),
    Key("fp16.consecutive_hysteresis", Only(_FALSE, "the hysteresis is restored when the scale doubles: leave it out")),
    Key("fp16.auto_cast", NoEffect("inputs are token ids"), Sets(true_in_words, "module.fp16_auto_cast")),
    Key("fp16.fp16_master_weights_and_grads", Only(_FALSE, FP32_STATE)),
    *(row for bf16 in ("bf16.", "bfloat16.") for row in (
        Key(f"{bf16}enabled", Sets(true_in_words, "precision.bf16")),
        *_same(Only(_FALSE, FP32_STATE), bf16, "bf16_master_weights_and_grads bf16_optimizer_states"),
        Key(f"{bf16}auto_cast", NoEffect("inputs are token ids"), Sets(true_in_words, "module.bf16_auto_cast")),
    )),
)

_ZERO_ = "zero_optimization."
_OPTIMIZER_OUT, _PARAMETERS_OUT = f"{_ZERO_}offload_optimizer.", f"{_ZERO_}offload_param."
_ALL_USED = NoEffect("every parameter of a GPT is used")
_ZERO = (
    Key(f"{_ZERO_}stage", Sets(whole, "parallel.zero_stage")),
    Key(f"{_OPTIMIZER_OUT}device", Sets(word_of({"none": False, "cpu": True, "nvme": True}), "offload.cpu_optimizer")),
    Key(f"{_OPTIMIZER_OUT}nvme_path", Sets(text, "offload.optimizer_nvme_path")),
    Key(f"{_OPTIMIZER_OUT}ratio", Sets(share, "offload.cpu_optimizer_ratio",
        "exact here: this share of the elements, at every ZeRO stage")),
    *_same(_NVME, _OPTIMIZER_OUT, "buffer_count buffer_size pipeline_read pipeline_write pipeline fast_init"),
    Key(f"{_PARAMETERS_OUT}device", Sets(parameters_on_cpu, "offload.cpu_parameters")),
    Key(f"{_ZERO_}cpu_offload", Sets(true_in_words, "offload.cpu_optimizer")),
    *_same(Sets(true_in_words, "offload.cpu_parameters"), _ZERO_, "cpu_offload_param cpu_offload_params"),
    *_same(_ALL_USED, _ZERO_, "ignore_unused_parameters find_unused_parameters",
        Sets(true_in_words, "module.ignore_unused_parameters", "they are updated with a gradient of zero")),
)

_LOGS = (
    *_same(NoEffect(_MEASURED), "", "wall_clock_breakdown timers", _TIMES),
    Key("comms_logger", NoEffect("see gptpar benchmark --breakdown"), _TIMES),
    Key("tensorboard", Sets(if_enabled(monitor_folder), "logging.tensorboard_dir", inside=_MONITOR)),
    Key("csv_monitor", Sets(if_enabled(monitor_folder), "logging.csv_dir", inside=_MONITOR)),
    Key("wandb", Sets(if_enabled(wandb_words), "logging.wandb_project logging.wandb_entity logging.wandb_group",
        inside="enabled group team project")),
    *_same(NoEffect("see --tensorboard-dir and --wandb-project",
        "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode"), "",
        "comet", NoEffect("see tensorboard, csv_monitor and wandb")),
    Key("flops_profiler", Sets(if_enabled(lambda section: True), "logging.log_throughput",
        "each line tells TFLOP/s; gptpar benchmark --breakdown tells which part takes which time",
        "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor"), _TIMES),
)

_ACTIVATIONS = "activation_checkpointing."
_REST = (
    Key(f"{_ACTIVATIONS}partition_activations", Sets(if_true, "recompute.distribute_saved_activations"),
        _OWN_RECOMPUTE),
    Key(f"{_ACTIVATIONS}cpu_checkpointing", Sets(if_true, "recompute.checkpoint_in_cpu"), _OWN_RECOMPUTE),
    *_same(_RECOMPUTE, _ACTIVATIONS,
        "contiguous_memory_optimization number_checkpoints num_checkpoints synchronize_checkpoint_boundary profile",
        _OWN_RECOMPUTE),
    Key("pipeline.stages", _PIPELINE, Sets(whole, "pipeline.stages")),
    Key("pipeline.partition", _PIPELINE, Sets(partition, "pipeline.partition")),
    Key("pipeline.activation_checkpoint_interval", _PIPELINE, Sets(whole, "pipeline.recompute")),
    Key("pipeline.seed_layers", _PIPELINE, NoEffect("each layer's initial values are drawn from a seed of its own")),
    Key("pipeline.use_reentrant", _PIPELINE, NoEffect("activations are computed again without nested backward passes")),
    *_same(_PIPELINE, "pipeline.", "pipe_partitioned grad_partitioned",
        NoEffect("activations go whole from stage to stage")),
    Key("checkpoint.tag_validation", NoEffect("a run's checkpoints are named after their steps"),
        Sets(tag_validation, "module.tag_validation")),
    Key("aio", NoEffect(_NVME.why,
        "block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events use_gds")),
    *_same(NoEffect("see --no-compile", "enabled backend kwargs deepcompile offload_activation passes"), "", "compile",
        NoEffect("see gptpar.compile")),
    *_same(NoEffect(IGNORED), "", "cuda_visible_devices monitor_config comms_config"),
    Key("data_efficiency", Absent("curriculum learning and data routing", asks_for_routing)),
    Key("sparse_attention", Absent("sparse attention", asks_for_sparsity)),
    Key("tensor_parallel",
        Absent("tensor parallelism by this file (see --tensor-model-parallel-size)", asks_for_parallelism),
        Absent("tensor parallelism of any module", asks_for_parallelism)),
    Key("sequence_parallel_size", Sets(whole, "parallel.context_parallel_size"),
        Only((1,), "the sequences of any module are not divided over processes: leave it out")),
)

_GPTPAR = (
    Key("gptpar.compile", None, Sets(switch, "module.compile")),
    Key("gptpar.units", None, Sets(class_names, "module.units")),
    Key("gptpar.step_graph", None, Sets(switch, "precision.cuda_graph")),
    Key("gptpar.speculation", None, Sets(switch, "offload.offload_speculation")),
    Key("gptpar.threads", None, Sets(whole, "offload.cpu_optimizer_threads")),
    Key("gptpar.virtual_stages", None, Sets(whole, "pipeline.virtual_stages")),
    Key("gptpar.async_save", None, Sets(truth, "checkpoint.async_save")),
    Key("gptpar.seed", None, Sets(whole, "data.seed")),
    Key("gptpar.skip_step_sigma", None, Sets(number, "health.skip_step_sigma")),
    Key("gptpar.skip_step_window", None, Sets(whole, "health.skip_step_window")),
)
# fmt: on

TABLE = (*_BATCH, *OPTIMIZER, *_SCHEDULER, *_FORMATS, *_ZERO, *_LOGS, *_REST, *_GPTPAR, *_rows_of_file())


def keys_for(raw: Mapping[str, Any], door: Door) -> Tree:
    """The keys that a file may hold at a door; those of the optimizer and the schedule depend on their types."""
    types = {section: type_of(raw, section) for section in TYPES}
    tree: Tree = {}
    for row in TABLE:
        *sections, name = row.path.split(".")
        rule = row.rule(door)
        if rule is None or (row.of and types[sections[0]] not in row.of):
            continue
        at: Any = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = rule
    for section, kind in types.items():
        if kind not in TYPES[section]:
            keys: Any = tree[section]
            unread = NotRead() if kind else NoEffect("there is no scheduler.type")
            tree[section] = NotRead() if section == "optimizer" else {"type": keys["type"], "params": unread}
    return tree


def defaults_for(raw: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's defaults of absent keys, if they differ from gptpar's own; by path."""
    return {
        row.path: row.default
        for row in TABLE
        if row.default is not None
        and (row.path.partition(".")[0] in raw or "." not in row.path)
        and (not row.of or type_of(raw, row.path.partition(".")[0]) in row.of)
    }


def type_of(raw: Mapping[str, Any], section: str) -> str:
    """The type of the optimizer or the schedule in small letters; an optimizer without one is AdamW."""
    value = raw.get(section)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in (None, "auto"):
        return "adamw" if section == "optimizer" else ""
    return str(kind).lower()
