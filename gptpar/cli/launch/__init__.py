"""Starts one worker for each visible GPU, unless torchrun or SLURM has started them already, and ends them in order.

On one machine the launcher is ours (``supervisor``); with ``--max-restarts`` it starts the workers again after a death.
On several machines the launcher is torchrun (``machines``). torchrun kills its workers 30 seconds after a signal, in
the middle of a save (before torch 2.13 this cannot be changed). Therefore torchrun does not get the signals: in both
cases ``relay`` passes them on to the workers, which save and end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gptpar.cli import hostfile
from gptpar.cli.launch.failure import Failure
from gptpar.cli.launch.job import HANG_SECONDS, ONE_MACHINE, LaunchJob, job_of, keep_all, program_of, read_flags
from gptpar.cli.launch.machines import run_torchrun
from gptpar.cli.launch.memory import folder_in_memory, keep_copies, owned_folder
from gptpar.cli.launch.program import Program
from gptpar.cli.launch.relay import NOTHING_LOST, Children, Relay, patience, print_message
from gptpar.cli.launch.supervisor import Supervisor
from gptpar.errors import GptparError
from gptpar.system.activity import all_activities
from gptpar.system.host import several_without_rank
from gptpar.system.limits import usable_cores
from gptpar.system.restart import was_stopped
from gptpar.system.stop import Stopped

ACTIVITIES = "gptpar-activity-"
"""Prefix of the names of folders with the workers' records of activity."""


def is_worker() -> bool:
    """Whether this process was started by torchrun or by a launcher of this package."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def workers_wanted(nproc_per_node: int | None) -> int:
    """The number of workers on this machine: as asked for, else one for each visible GPU, else one."""
    if nproc_per_node:
        return nproc_per_node
    import torch  # a second, which a verb that needs no GPU should not pay for

    return max(1, torch.cuda.device_count())


def start_workers(
    count: int,
    argv: Sequence[str],
    *,
    max_restarts: int = 0,
    hang_seconds: float | None = None,
    processes_left: Callable[[int], int] = keep_all,
) -> int:
    """Run ``python -m gptpar ARGV`` in ``count`` processes of this machine; returns an exit code.

    Args:
        argv: the verb and its flags.
        max_restarts, hang_seconds, processes_left: see :class:`LaunchJob`.

    Raises:
        GptparError: mpirun or srun started several processes without RANK: each would start workers of its own.
    """
    refuse_several()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // count)))
    return run_job(
        LaunchJob(
            Program("module", "gptpar", tuple(argv)),
            count,
            max_restarts=max_restarts,
            hang_seconds=hang_seconds or (HANG_SECONDS if max_restarts else 0.0),
            modules=(f"gptpar.cli.{argv[0].replace('-', '_')}", *_IMPORTED_LATER),
            processes_left=processes_left,
        )
    )


_IMPORTED_LATER = ("tensorboard.summary.writer.record_writer", "torch.fx.experimental.symbolic_shapes")
"""Modules that a run imports on its way to the second step; torch imports the last one for the first gradient."""


def main(argv: Sequence[str]) -> int:
    """``gptpar launch``: takes torchrun's flags, or DeepSpeed's; the workers get the time they need to save.

    Raises:
        GptparError: the workers did not find each other; or mpirun or srun started several launchers, and each would
            start its own run.
    """
    if hostfile.is_asked_for(argv):
        refuse_several()
        return hostfile.main(argv, main)
    words = read_flags(argv)
    if words.nnodes in ONE_MACHINE:
        refuse_several()
    job = job_of(words)
    if job is not None:
        if job.count > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        return run_job(job)
    if words.hang_seconds is not None:
        raise GptparError(
            "--hang-seconds watches the workers of one machine, without torchrun's rendezvous and log flags: leave it "
            "out; a worker that waits too long for another ends after --distributed-timeout-minutes."
        )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(owned_folder(Path(tempfile.gettempdir()), ACTIVITIES))
        memory = stack.enter_context(folder_in_memory(print_message)) if words.max_restarts else None
        relay = Relay(folder, patience(), Children(), program_of(words))
        return _exit_code(relay, folder, memory, False, lambda: run_torchrun(words, folder, memory))


def refuse_several() -> None:
    """Refuse processes of mpirun or srun without RANK: each would start workers of its own.

    Raises:
        GptparError: this is one of several.
    """
    if problem := several_without_rank(os.environ):
        raise GptparError(f"{problem}.")


def run_job(job: LaunchJob) -> int:
    """Run a job's workers; returns an exit code."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(owned_folder(Path(tempfile.gettempdir()), ACTIVITIES))
        memory = stack.enter_context(folder_in_memory(print_message)) if job.max_restarts else None
        supervisor = Supervisor(job, folder, memory)
        return _exit_code(supervisor.relay, folder, memory, True, supervisor.run)


def _exit_code(
    relay: Relay, folder: Path, memory: Path | None, is_alone: bool, run: Callable[[], Failure | None]
) -> int:
    """Run workers. Copies of a failed run in memory are kept, for its newest state may not be on the disk."""
    code = None
    try:
        code = _ended(relay, folder, run)
        return code
    finally:
        has_failed = code not in (0, 128 + (relay.signal or 0)) and not was_stopped(folder)
        if has_failed and memory is not None and (sentence := keep_copies(memory, is_alone=is_alone)):
            print_message(sentence)


def _ended(relay: Relay, folder: Path, run: Callable[[], Failure | None]) -> int:
    try:
        with relay.relaying():
            failure = run()
    except Stopped as stopped:  # no worker was there to take the request
        print_message(f"{stopped}{'' if all_activities(folder) else NOTHING_LOST}")
        return 128 + stopped.signal
    return relay.exit_code(failure)
