"""``Flags``, the typed flags with open fields, and ``Config``, the complete configuration that they become.

``Flags`` is what a command line says. Its fields are the flags; those that nobody typed are ``None`` or a default, and
some only stand for others (``--use-distributed-optimizer``, ``--preset``). It is read by this room alone and by those
that change what is typed: a search of layouts, a sweep.

``Config`` is what everything else gets, a section of it where a section suffices. It is complete: a field is ``None``
only where that means something ("never", "no folder"), aliases are gone, and ``"auto"`` stands only where a run on its
GPU decides.

The door, ``validate.resolve``, goes from one to the other: the sections' ``derive_...`` fill what follows from other
flags and say why, their ``check_...`` find all problems at once, and :func:`complete` builds the ``Config``.

A file of ``sections`` declares a section once, with its derivations and checks. ``...Config`` has the fields of the
complete section. A field whose type ends in ``| Open`` is ``None`` until something says it: as typed, a section is
``...Config[None]``, and complete it is ``...Config``. Flags that only stand for others are fields of ``...Flags``,
which adds them to ``...Config[None]``.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass, field
from typing import Any, Self

from gptpar.config.fields import FlagField, completed, fields_of, flag
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
class _Sections:
    """Sections by name. They are frozen: another value makes a new whole."""

    def update(self, section: str, **values: Any) -> Self:
        """A copy in which fields of one section have new values."""
        changed = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **{section: changed})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return dataclasses.asdict(self)


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
class Flags(_Sections):
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
class Config(_Sections):
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


def padded_vocab(vocab_size: int, multiple: int, rows: int | None = None) -> int:
    """Rows of the embedding: as given, else the vocabulary rounded up to a multiple; never a function of the layout."""
    return -(-vocab_size // multiple) * multiple if rows is None else rows


def softmax_vocab(vocab_size: int, rows: int, *, over_padding: bool) -> int:
    """Rows over which the softmax runs."""
    return rows if over_padding else vocab_size


def complete(flags: Flags) -> Config:
    """The configuration that flags say.

    Args:
        flags: the flags that ``derive`` returned without problems.

    Raises:
        TypeError: a field that must be known is open.
    """
    sections: dict[str, Any] = {
        name: completed(kind, getattr(flags, name)) for name, kind in _section_types().items() if name != "model"
    }
    return Config(model=complete_model(flags.model, flags.tokenizer), **sections)


def complete_model(flags: ModelFlags, tokenizer: TokenizerConfig) -> ModelConfig:
    """The model; its vocabulary is that of a checkpoint, or of ``--vocab-size``.

    A checkpoint that says its rows alone has all of them in the softmax: one of another program, or an older one.
    """
    size, stored = tokenizer.vocab_size or 0, flags.padded_vocab_size
    rows = stored or padded_vocab(size, flags.make_vocab_size_divisible_by, flags.pad_vocab_size_to)
    over_padding = flags.softmax_over_padding or stored is not None
    filled = dataclasses.replace(
        flags,
        max_position_embeddings=flags.max_position_embeddings or flags.seq_length,
        padded_vocab_size=rows,
        softmax_vocab_size=flags.softmax_vocab_size or softmax_vocab(size, rows, over_padding=over_padding),
        softmax_over_padding=flags.softmax_over_padding if flags.softmax_vocab_size else over_padding,
    )
    return completed(ModelConfig, filled)


@functools.cache
def _section_types() -> dict[str, type]:
    return typing.get_type_hints(Config)
