"""Flags of restarts after a worker's death, and of copies in memory."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """How a run goes on by itself after a worker has died."""

    max_restarts: int = flag(
        0, "how many times the workers of this machine may be started again after a death", least=0, most=1_000_000
    )
    hang_seconds: float | None = flag(
        None,
        "seconds without a sign of life after which workers count as dead (default: 600 with --max-restarts)",
        above=0,
        most=1_000_000,
    )
    mirror_interval: int | None = flag(
        None,
        "with --max-restarts (several machines: of gptpar launch): steps between copies of the state in memory; each "
        "of several machines keeps its own files and its neighbour's",
        least=1,
    )
