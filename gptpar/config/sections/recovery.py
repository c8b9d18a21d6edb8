"""Flags of restarts after a worker's death, and of copies in memory, and whether they find a whole state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptpar.config.fields import flag

if TYPE_CHECKING:
    from gptpar.config import Flags


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


def check_recovery(flags: Flags) -> Iterator[str]:
    """Whether there will be a whole state to go on from."""
    r, c = flags.recovery, flags.checkpoint
    asked = {"--max-restarts": r.max_restarts, "--mirror-interval": r.mirror_interval}
    for name, value in asked.items():
        if value and c.no_save_optim:
            yield (
                f"{name} {value} with --no-save-optim: a restart would find no optimizer state; leave one of them out."
            )
