"""Start one worker for each visible GPU, unless somebody (torchrun, SLURM) has done so already."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gptpar.activity import FOLDER_VARIABLE, last_activity


def is_worker() -> bool:
    """Whether this process was started by torchrun or by :func:`start_workers`."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def workers_wanted(nproc_per_node: int | None) -> int:
    """Processes this machine is to run: as asked for, else one for each visible GPU, else one."""
    if nproc_per_node:
        return nproc_per_node
    import torch  # a second, which a verb that needs no GPU should not pay for

    return max(1, torch.cuda.device_count())


def start_workers(count: int, argv: Sequence[str]) -> int:
    """Run ``python -m gptpar ARGV`` in ``count`` processes through torch.distributed.run; returns an exit code.

    Args:
        argv: the verb and its flags.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # What went wrong is said by the worker itself and by the line below; torchrun's own report would bury both.
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    words = ["--standalone", f"--nproc-per-node={count}", "-m", "gptpar", *argv]
    with tempfile.TemporaryDirectory(prefix="gptpar-activity-") as folder:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            run(get_args_parser().parse_args(words))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            print(f"error: rank {rank} {_ending(failure.exitcode, last_activity(Path(folder), rank))}", file=sys.stderr)
            return failure.exitcode if failure.exitcode > 0 else 1
        except SignalException as stopped:  # the workers were given the signal and the time to save
            return 128 + stopped.sigval
    return 0


def _ending(exit_code: int, doing: str) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            f"was killed by SIGKILL, as Linux does to the largest process when memory is full, while it was at {doing}"
        )
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name} while it was at {doing}"
    return f"ended with exit code {exit_code} while it was at {doing}; its message is above"
