"""Whether a run can go on after a death as its flags say."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Flags


def check_recovery(flags: Flags) -> Iterator[str]:
    """Whether there will be a whole state to go on from."""
    r, c = flags.recovery, flags.checkpoint
    if r.max_restarts and c.no_save_optim:
        yield (
            f"--max-restarts {r.max_restarts} with --no-save-optim: a restart would find no optimizer state; leave one "
            "of them out."
        )
