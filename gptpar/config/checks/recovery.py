"""Checks whether a run can go on after a worker's death as its flags say."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Flags


def check_recovery(flags: Flags) -> Iterator[str]:
    """Whether there will be a whole state to go on from."""
    r, c = flags.recovery, flags.checkpoint
    asked = {"--max-restarts": r.max_restarts, "--mirror-interval": r.mirror_interval}
    for flag, value in asked.items():
        if value and c.no_save_optim:
            yield (
                f"{flag} {value} with --no-save-optim: a restart would find no optimizer state; leave one of them out."
            )
