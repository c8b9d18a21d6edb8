"""Configuration: frozen dataclasses, the flags made from them, derived values and one validation."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from gptpar.config.data import DataConfig, TokenizerConfig
from gptpar.config.model import ModelConfig
from gptpar.config.offload import OffloadConfig
from gptpar.config.run import CheckpointConfig, DeepSpeedConfig, LoggingConfig, ParallelConfig
from gptpar.config.training import BatchConfig, OptimizerConfig, PrecisionConfig, RecomputeConfig


@dataclass(frozen=True)
class Config:
    """Everything a run is told. Sections are frozen: a derived value makes a new ``Config``."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)

    def update(self, section: str, **values: Any) -> Config:
        """A copy in which fields of one section have new values."""
        changed = dataclasses.replace(getattr(self, section), **values)
        return dataclasses.replace(self, **{section: changed})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Config:
        """The inverse of :meth:`to_dict`; fields it does not know are left out, absent ones get defaults."""
        sections: dict[str, Any] = {}
        for spec in dataclasses.fields(Config):
            kind = type(getattr(Config(), spec.name))
            known = {f.name for f in dataclasses.fields(kind)}
            given = values.get(spec.name, {})
            plain = {k: _as_tuples(v) for k, v in given.items() if k in known}
            sections[spec.name] = kind(**plain)
        return Config(**sections)


def _as_tuples(value: Any) -> Any:
    """JSON knows lists alone."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DeepSpeedConfig",
    "LoggingConfig",
    "ModelConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "TokenizerConfig",
]
