"""``Flags``, the typed flags with open fields, and ``Config``, the complete configuration that they become.

``Flags`` is what a command line says. Its fields are the flags; those that nobody typed are ``None`` or a default, and
some only stand for others (``--use-distributed-optimizer``, ``--preset``). Only this package reads it, and code
that changes what is typed: a search of layouts, a sweep.

``Config`` is what everything else gets, a section of it where a section suffices. It is complete: a field is ``None``
only where that means something ("never", "no folder"), aliases are gone, and ``"auto"`` stands only where a run on its
GPU decides.

The door, ``validate.resolve``, goes from one to the other: the sections' ``derive_...`` fill what follows from other
flags and say why, their ``check_...`` find all problems at once, and ``validate.complete`` builds the ``Config``.

A file of ``sections`` declares a section once, with its derivations and checks. ``...Config`` has the fields of the
complete section. A field whose type ends in ``| Open`` is ``None`` until something says it: as typed, a section is
``...Config[None]``, and complete it is ``...Config``. Flags that only stand for others are fields of ``...Flags``,
which adds them to ``...Config[None]``.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

from gptpar.config.fields import FlagField, Sections, fields_of, flag
from gptpar.config.sections.batch import BatchConfig, BatchFlags
from gptpar.config.sections.checkpoint import CheckpointConfig, RecoveryConfig
from gptpar.config.sections.data import DataConfig, DataFlags, TokenizerConfig
from gptpar.config.sections.logging import HealthConfig, LoggingConfig, LoggingFlags
from gptpar.config.sections.model import ModelConfig, ModelFlags
from gptpar.config.sections.offload import OffloadConfig
from gptpar.config.sections.optimizer import OptimizerConfig, OptimizerFlags
from gptpar.config.sections.parallel import ParallelConfig, ParallelFlags
from gptpar.config.sections.precision import PrecisionConfig
from gptpar.config.sections.recompute import RecomputeConfig, RecomputeFlags


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFlags:
    """A DeepSpeed configuration that says what the command line leaves open."""

    deepspeed: bool = flag(False, "read --deepspeed_config, whose keys keep DeepSpeed's meaning")
    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed's JSON, comments and trailing commas allowed: batch sizes, optimizer, schedule, clipping, number "
        "format, ZeRO stage and optimizer offload; with --lr, flags make the optimizer; other flags that contradict it "
        "are refused",
        names=("--deepspeed_config",),
        metavar="FILE",
    )


@dataclass(frozen=True, kw_only=True)
class Flags(Sections):
    """The flags as they are typed; what nobody typed is ``None`` or a default."""

    model: ModelFlags = field(default_factory=ModelFlags)
    parallel: ParallelFlags = field(default_factory=ParallelFlags)
    batch: BatchFlags = field(default_factory=BatchFlags)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    recompute: RecomputeFlags = field(default_factory=RecomputeFlags)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    data: DataFlags = field(default_factory=DataFlags)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    logging: LoggingFlags = field(default_factory=LoggingFlags)
    health: HealthConfig = field(default_factory=HealthConfig)
    deepspeed: DeepSpeedFlags = field(default_factory=DeepSpeedFlags)


@functools.cache
def flag_fields() -> tuple[FlagField, ...]:
    """Every flag of the configuration, section by section."""
    sections = dataclasses.fields(Flags)
    return tuple(one for section in sections for one in fields_of(section.name, type(getattr(Flags(), section.name))))


@dataclass(frozen=True, kw_only=True)
class Config(Sections):
    """The complete configuration, on which the program runs."""

    model: ModelConfig
    parallel: ParallelConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    recompute: RecomputeConfig
    offload: OffloadConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    checkpoint: CheckpointConfig
    recovery: RecoveryConfig
    logging: LoggingConfig
    health: HealthConfig
