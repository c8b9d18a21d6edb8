"""Reads the configuration of ``gptpar.initialize``, checks and completes it. Pure, except that it reads the file.

The configuration is DeepSpeed's JSON with a section of our own, ``"gptpar"``. It is read as the command line reads
``--deepspeed_config``: by one tree of keys, with the same defaults of DeepSpeed, and unknown keys are problems.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from gptpar.adapter import torch_optimizers
from gptpar.adapter.matrix_groups import MatrixOptions
from gptpar.adapter.monitor import monitor_problems
from gptpar.adapter.step_batch import StepBatch, step_batch
from gptpar.config import Flags, LoggingConfig, LoggingFlags, OffloadConfig, PrecisionConfig
from gptpar.config.deepspeed_reader import (
    KeyReader,
    optimizer_problems,
    part_of,
    read_file,
    read_values,
    schedule_problems,
    without_auto,
)
from gptpar.config.deepspeed_rules import Door
from gptpar.config.fields import Derived
from gptpar.config.jsonc import infinity
from gptpar.config.sections.parallel import HIGHEST_ZERO_STAGE
from gptpar.config.validate import out_of_range
from gptpar.errors import ConfigError
from gptpar.optim.adamw import ADAMW
from gptpar.optim.elementwise import ElementwiseOptimizer
from gptpar.optim.loss_scale import LossScale, make_loss_scale
from gptpar.optim.optimizers import updates_of
from gptpar.optim.update import Hyperparameters

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
OTHER_OPTIMIZER = "pass optimizer=torch.optim.AdamW(...) to gptpar.initialize"
DEFAULT_LR = 1e-3
"""AdamW's default in torch and in DeepSpeed."""

_OFFLOAD = "zero_optimization.offload_optimizer"


class ModelKind(enum.Enum):
    """What is trained: a module, a list of layers that the configuration divides, or a pipeline with its own stages."""

    MODULE = enum.auto()
    LAYERS = enum.auto()
    PIPELINE = enum.auto()


@dataclass(frozen=True)
class SchedulerOptions:
    """One of DeepSpeed's schedules by name, with the arguments of the class of that name in ``schedulers.py``."""

    type: str
    params: Mapping[str, Any]


@dataclass(frozen=True)
class PipelineOptions:
    """How a list of layers becomes a pipeline.

    Attributes:
        stages: number of stages, over which the layers are divided.
        partition: see :class:`~gptpar.adapter.pipeline_module.PipelineModule`.
        virtual_stages: virtual stages of each process.
        recompute: number of consecutive layers that are recomputed together in the backward pass; 0: none.
    """

    stages: int = 1
    partition: str = "parameters"
    virtual_stages: int = 1
    recompute: int = 0


@dataclass(frozen=True)
class EngineOptions:
    """The whole configuration of an engine for any module.

    Attributes:
        batch: samples of a step and of a micro-batch.
        dtype: of the model's floating-point parameters; ``None``: each keeps its own.
        cast_inputs: whether floating-point inputs are cast to the model's 16-bit format.
        loss_scale: of the first step; the engine changes a copy of it.
        zero_stage: 0 to 3.
        offload: what is in host memory.
        max_norm: the gradient's global norm is clipped to this (0: never).
        reduce_in_bf16: whether gradients are reduced in bf16; else in the format of the master weights.
        optimizer: default hyperparameters of a group; ``None``: the configuration names no optimizer.
        update: how elements are updated; of groups with ``use_muon``, ``by_matrix`` says it.
        torch_optimizer: makes torch's optimizer that the configuration names; ``None``: ``optimizer`` counts.
        buffer_dtype: of floating-point buffers; ``None``: they keep their own.
        has_optimizer: whether there is one, the user's or the configuration's; without it, nothing is trained.
        scheduler: ``None``: the configuration names none.
        steps_per_print: steps between lines on the console; 0: none.
        compile: ``auto``, ``on`` or ``off``: whether blocks are compiled.
        units: names of the classes whose modules are units; empty: the module's structure decides.
        step_graph: ``auto``, ``on`` or ``off``: whether ``train_batch`` records steps as graphs.
        seed: of the order of ``training_data``, and of the initial values of layers that are built from specifications.
        derived: values with their reasons, among them DeepSpeed's defaults for missing keys.
        without_effect: keys that have no effect, each with the reason.
        pipeline: of a list of layers.
        async_save: whether ``save_checkpoint`` returns while training goes on and the files are written.
        tag_validation: what happens if processes give a checkpoint different tags: ``ignore``, ``warn`` or ``fail``.
        monitor: where DeepSpeed's curves are written.
        ignore_unused: whether a step may leave parameters without a gradient.
        drop_last: whether the loader of ``training_data`` leaves out samples that fill no micro-batch on every process.
        managed: whether micro-batches are counted until a step ends; else each ``step()`` ends one.
        sums_gradients: whether the step's gradient is the sum over processes, and not the mean.
        skip_step: sigma (``None``: no step is judged) and window of :mod:`~gptpar.optim.skip_step`.
        config: the configuration as it was given, without ``"auto"`` values.
    """

    batch: StepBatch
    dtype: torch.dtype | None
    cast_inputs: bool
    loss_scale: LossScale
    zero_stage: int
    offload: OffloadConfig
    max_norm: float
    reduce_in_bf16: bool
    optimizer: Hyperparameters | None
    scheduler: SchedulerOptions | None
    steps_per_print: int
    compile: str
    units: tuple[str, ...]
    step_graph: str
    seed: int
    derived: tuple[Derived, ...]
    without_effect: tuple[str, ...]
    config: Mapping[str, Any]
    pipeline: PipelineOptions = PipelineOptions()
    async_save: bool = False
    tag_validation: str = "warn"
    ignore_unused: bool = True
    drop_last: bool = True
    skip_step: tuple[float | None, int] = (None, 128)
    update: ElementwiseOptimizer = ADAMW
    by_matrix: MatrixOptions | None = None
    torch_optimizer: Callable[..., torch.optim.Optimizer] | None = None
    buffer_dtype: torch.dtype | None = None
    has_optimizer: bool = True
    sums_gradients: bool = False
    managed: bool = True
    monitor: LoggingFlags = LoggingConfig()

    def facts(self) -> dict[str, str]:
        """What must be the same on all processes: option -> value, in words."""
        offload = replace(self.offload, optimizer_nvme_path=None, cpu_optimizer_threads=None)
        mine = replace(
            self, offload=offload, derived=(), without_effect=(), steps_per_print=0, monitor=LoggingConfig(), config={}
        )
        return {field.name: str(getattr(mine, field.name)) for field in fields(mine)} | {"update": self.update.name}

    @property
    def input_dtype(self) -> torch.dtype | None:
        """What floating-point inputs are cast to; ``None``: they are not."""
        return self.dtype if self.cast_inputs else None


def read_options(
    config: str | os.PathLike[str] | Mapping[str, Any] | None,
    args: object = None,
    *,
    world: int,
    model: ModelKind = ModelKind.MODULE,
) -> EngineOptions:
    """Read a configuration.

    Args:
        config: DeepSpeed's JSON as a path (comments and trailing commas allowed) or a dictionary.
        args: a script's command line, whose ``deepspeed_config`` names the file instead.
        world: number of processes; for a pipeline that is divided already, the number of data-parallel ones.
        model: what is trained.

    Raises:
        ConfigError: something is wrong; it names all problems.
    """
    raw, name = _raw_of(config, getattr(args, "deepspeed_config", None))
    options, problems = _options_of(raw, world, model)
    if options is None:
        raise ConfigError([f"{name}: {problem}" for problem in problems])
    return options


def _raw_of(config: Any, from_args: Any) -> tuple[dict[str, Any], str]:
    """(the configuration as plain JSON, its name for messages)"""
    if (config is None) == (from_args is None):
        both = f"both by config and by args.deepspeed_config ({from_args}): drop one of them"
        neither = "neither by config nor by args.deepspeed_config: pass config=, a path or a dictionary"
        raise ConfigError([f"gptpar.initialize is configured {neither if config is None else both}."])
    source = from_args if config is None else config
    try:
        if isinstance(source, Mapping):
            return dict(json.loads(json.dumps(dict(source)), parse_constant=infinity)), "config"
        if isinstance(source, str | os.PathLike):
            return read_file(os.fspath(source)), str(source)
    except (TypeError, ValueError) as error:
        where = "config" if isinstance(source, Mapping) else source
        raise ConfigError([f"{where}: {error}"]) from None
    raise ConfigError([f"config is of type {type(source).__name__}: a path or a dictionary is needed."])


def _options_of(raw: Mapping[str, Any], world: int, model: ModelKind) -> tuple[EngineOptions | None, list[str]]:
    """(the options, if nothing is wrong; all problems)"""
    reader = read_values(raw, Door.ENGINE, Flags(), micro_is_known=False)
    values, (torch_optimizer, torch_problems) = _Values(reader), torch_optimizers.of_configuration(raw)
    stages = values.get("pipeline.stages", 1)
    problems = [
        *optimizer_problems(raw, OTHER_OPTIMIZER, others=torch_optimizers.TYPES),
        *torch_problems,
        *schedule_problems(raw, warns=True),
        *reader.problems,
        *values.out_of_range(),
        *_precision_problems(values.flags.precision, values.get("module.param_dtype", None)),
        *_zero_problems(values),
        *_offload_problems(values, raw),
        *_pipeline_problems(values, world, model),
        *monitor_problems(values.flags.logging),
    ]
    batch = None
    unclear = "train_", "gradient_accumulation_steps", "pipeline."
    if not any(problem.startswith(unclear) for problem in problems):
        try:
            batch = step_batch(*(values.get(f"batch.{name}", None) for name in _BATCH), world=world // stages)
        except ValueError as error:
            problems.append(str(error))
    if problems or batch is None:
        return None, problems
    notes = [*reader.without_effect, *_pipeline_notes(values, model)]
    options = _assembled(values, batch, without_auto(raw), notes)
    if torch_optimizer is not None:
        updates = torch_optimizers.update_options(torch_optimizer([torch.zeros(0)]))
        options = replace(options, torch_optimizer=torch_optimizer, **updates)
    return options, []


class _Values:
    """The values that a configuration sets, by field; fields of gptpar's own sections are in ``flags``, too."""

    def __init__(self, reader: KeyReader):
        self._said, self.flags = reader.values, Flags()
        for one in self._said.values():
            section, name = one.field.split(".")
            if hasattr(self.flags, section):
                self.flags = self.flags.update(section, **{name: one.value})

    def get(self, field: str, default: Any) -> Any:
        return self._said[field].value if field in self._said else default

    def section(self, name: str) -> dict[str, Any]:
        """The values that are set in one section."""
        return {field.split(".")[1]: one.value for field, one in self._said.items() if field.startswith(f"{name}.")}

    def out_of_range(self) -> Iterator[str]:
        for field, problem in out_of_range(self.flags).items():
            yield f"{self._said[field].key} {problem}."

    def derived(self) -> Iterator[Derived]:
        for field, one in self._said.items():
            if one.value is not None and one.value is not False:
                yield Derived(field.split(".")[1].replace("_", " "), one.value, one.reason)


_BATCH = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps")


def _precision_problems(precision: PrecisionConfig, wanted: str | None) -> Iterator[str]:
    """Contradictions among the number formats.

    Args:
        wanted: ``data_types.param_dtype``; ``None``: it is not given.
    """
    found = "fp16" if precision.fp16 else "bf16" if precision.bf16 else "fp32"
    if wanted not in (None, found):
        yield f"data_types.param_dtype is {json.dumps(wanted)}, and fp16 and bf16 say {found}: make them agree."
    if precision.fp16 and precision.bf16:
        yield "fp16 and bf16 are both enabled: choose one number format."
    if precision.fp16 and precision.loss_scale is None and precision.initial_loss_scale < precision.min_loss_scale:
        yield (
            f"fp16.initial_scale_power: the scale begins at {precision.initial_loss_scale:g}, below min_loss_scale "
            f"{precision.min_loss_scale:g}: raise it, or lower min_loss_scale."
        )


def _zero_problems(values: _Values) -> Iterator[str]:
    stage = values.get("parallel.zero_stage", 0)
    if stage > HIGHEST_ZERO_STAGE:
        yield f"zero_optimization.stage is {stage}; it must be at most {HIGHEST_ZERO_STAGE}."


def _offload_problems(values: _Values, raw: Mapping[str, Any]) -> Iterator[str]:
    offload, device = values.flags.offload, part_of(raw, *_OFFLOAD.split(".")).get("device")
    folder = offload.optimizer_nvme_path
    if device == "nvme" and folder is None:
        yield f"{_OFFLOAD}.nvme_path is missing: the folder in which the optimizer's state is kept."
    if folder is not None and not os.path.isdir(folder):
        yield f"{_OFFLOAD}.nvme_path is {json.dumps(folder)}, which is not a folder."
    if folder is not None and offload.offload_speculation == "on":
        yield (
            f'gptpar.speculation is "on": it needs a second copy of the state in memory, which {_OFFLOAD}.device '
            '"nvme" avoids; drop one of them.'
        )


def _pipeline_problems(values: _Values, world: int, model: ModelKind) -> Iterator[str]:
    stages, virtual_stages = values.get("pipeline.stages", 1), values.get("pipeline.virtual_stages", 1)
    numbers = {"pipeline.stages": stages, "gptpar.virtual_stages": virtual_stages}
    for key, number in numbers.items():
        if number < 1:
            yield f"{key} is {number}: at least 1 is needed."
    if values.get("pipeline.recompute", 0) < 0:
        yield "pipeline.activation_checkpoint_interval is negative: 0 recomputes nothing."
    if model is not ModelKind.MODULE:
        yield from _problems_of_layers(values)
    if model is not ModelKind.LAYERS:
        yield from _problems_of_undivided({key: number for key, number in numbers.items() if number > 1}, model)
    elif stages > 0 and world % stages:
        yield f"pipeline.stages is {stages}, and {world} process(es) are no multiple of it: start a multiple."
    elif virtual_stages > 1 and stages == 1:
        yield f"gptpar.virtual_stages is {virtual_stages}: it needs pipeline.stages of at least 2."


def _problems_of_undivided(numbers: Mapping[str, int], model: ModelKind) -> Iterator[str]:
    """Problems of numbers of stages above 1, for a model that the configuration does not divide."""
    has = {ModelKind.MODULE: "is no list of layers", ModelKind.PIPELINE: "is a PipelineModule, which has its own"}
    if numbers:
        given = " and ".join(f"{key} {number}" for key, number in numbers.items())
        yield f"{given}: the model {has[model]}: drop it, or pass the list of layers as the model."


def _problems_of_layers(values: _Values) -> Iterator[str]:
    """Problems of keys that only a module can have."""
    if values.get("module.units", ()):
        yield "gptpar.units: the layers of a pipeline are its units: drop the key."
    if values.flags.precision.cuda_graph == "on":
        yield "gptpar.step_graph is true: steps of a pipeline of layers are not recorded: drop the key."


def _pipeline_notes(values: _Values, model: ModelKind) -> Iterator[str]:
    keys = {"partition": "partition", "recompute": "activation_checkpoint_interval"}
    for name in keys.keys() & values.section("pipeline").keys() if model is not ModelKind.LAYERS else ():
        yield f"pipeline.{keys[name]}: the model is no list of layers that would be divided"


def _assembled(values: _Values, batch: StepBatch, plain: Mapping[str, Any], without_effect: list[str]) -> EngineOptions:
    flags, offload = values.flags, values.flags.offload
    notes = [*without_effect]
    if not offload.cpu_optimizer:
        keys = {"speculation": "offload.offload_speculation", "threads": "offload.cpu_optimizer_threads"}
        notes += [
            f"gptpar.{k}: nothing is offloaded" for k, field in keys.items() if values.get(field, None) is not None
        ]
    o, named, rate = flags.optimizer, part_of(plain, "optimizer"), values.get("optimizer.lr", DEFAULT_LR)
    has_optimizer = "type" in named or bool(part_of(named, "params"))
    _, update = updates_of(o)
    schedule = values.section("scheduler")
    kind = schedule.pop("type", None)
    dtype, buffers = DTYPES.get(flags.precision.dtype), values.get("module.buffer_dtype", None)
    return EngineOptions(
        batch=batch,
        dtype=dtype,
        buffer_dtype=None if dtype is None else DTYPES.get(buffers, buffers and torch.float32),
        cast_inputs=values.get(f"module.{flags.precision.dtype}_auto_cast", False),
        loss_scale=make_loss_scale(flags.precision),
        zero_stage=values.get("parallel.zero_stage", 0),
        offload=offload,
        max_norm=o.clip_grad,
        reduce_in_bf16=flags.parallel.grad_reduce_in_bf16,
        optimizer=update.configured(o, rate, o.weight_decay) if has_optimizer else None,
        update=update,
        by_matrix=MatrixOptions.of(o, values.get("optimizer.muon_lr", rate)),
        scheduler=None if kind is None else SchedulerOptions(kind, schedule),
        steps_per_print=values.get("logging.log_interval", 0),
        compile=values.get("module.compile", "auto"),
        units=values.get("module.units", ()),
        step_graph=flags.precision.cuda_graph,
        seed=flags.data.seed,
        derived=tuple(values.derived()),
        without_effect=tuple(notes),
        pipeline=PipelineOptions(**values.section("pipeline")),
        ignore_unused=values.get("module.ignore_unused_parameters", True),
        drop_last=values.get("module.drop_last", True),
        managed=values.get("module.managed", True),
        sums_gradients=values.get("module.sums_gradients", False),
        async_save=values.get("checkpoint.async_save", False),
        tag_validation=values.get("module.tag_validation", "warn"),
        skip_step=(flags.health.skip_step_sigma, flags.health.skip_step_window),
        monitor=flags.logging,
        config=plain,
    )
