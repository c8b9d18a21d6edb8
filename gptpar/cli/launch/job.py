"""``LaunchJob``: what a launcher starts, from torchrun's flags or a verb, and ``--hang-seconds``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gptpar.cli.launch.program import LOCAL_RANK, Kind, Program
from gptpar.cli.launch.rendezvous import LOOPBACK
from gptpar.system.command_line import describe_if_asked, positive_float

HANG_SECONDS = 600.0
"""Default of ``--hang-seconds``. A first step may compile for minutes."""

ONE_MACHINE = ("1", "1:1")
"""Values of ``--nnodes``."""

IMPORTED_BY_ENGINES = ("gptpar.deepspeed.engines.initialize", "gptpar.checkpoint")
_OURS = {
    *("nnodes", "nproc_per_node", "standalone", "max_restarts", "monitor_interval", "module", "no_python"),
    *("training_script", "training_script_args", "master_addr", "master_port", "node_rank", "signals_to_handle"),
    *("hang_seconds", "pass_local_rank"),
}
"""Flags that a job honours itself, or that mean nothing on one machine."""


def keep_all(count: int) -> int:
    """Let as many workers go on as there were: the job needs all of them."""
    return count


@dataclass(frozen=True)
class LaunchJob:
    """Workers of one machine.

    Attributes:
        count: how many.
        max_restarts: how often they are started again after a death.
        hang_seconds: seconds without a sign of life after which they count as dead; 0: never.
        address, port: where they meet; port 0 is a free one.
        modules: modules that they import first.
        processes_left: number of processes before a death -> number of processes that go on after it.
    """

    program: Program
    count: int
    max_restarts: int = 0
    hang_seconds: float = 0.0
    address: str = LOOPBACK
    port: int = 0
    modules: Sequence[str] = IMPORTED_BY_ENGINES
    processes_left: Callable[[int], int] = keep_all

    @property
    def is_forked(self) -> bool:
        """Whether its workers are forks of a template."""
        return self.max_restarts > 0 and self.program.kind != "executable" and sys.platform.startswith("linux")


def read_flags(argv: Sequence[str]) -> argparse.Namespace:
    """torchrun's flags, and ``--hang-seconds``."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "gptpar launch"
    parser.add_argument(
        "--hang-seconds",
        "--hang_seconds",
        type=positive_float,
        metavar="S",
        help="on one machine, with --max-restarts: seconds without a sign of life after which workers are started "
        f"again, as after a death (default: {HANG_SECONDS:g})",
    )
    parser.add_argument(
        "--pass-local-rank",
        action="store_true",
        help="give the program --local_rank=N as its first argument, as DeepSpeed's launcher does",
    )
    describe_if_asked(parser, argv)
    words = parser.parse_args(list(argv))
    if words.pass_local_rank:
        words.training_script_args.insert(0, f"--local_rank={LOCAL_RANK}")
    return words


def program_of(words: argparse.Namespace) -> Program:
    """The program that torchrun's flags name."""
    kind: Kind = "executable" if words.no_python else "module" if words.module else "script"
    return Program(kind, words.training_script, tuple(words.training_script_args))


def job_of(words: argparse.Namespace) -> LaunchJob | None:
    """The job that torchrun's flags describe, if it is one machine's and needs nothing that only torchrun has."""
    from torch.distributed.run import determine_local_world_size, get_args_parser

    default = get_args_parser()
    if words.nnodes not in ONE_MACHINE or _asks_torchrun(words, default):
        return None
    chosen = not words.standalone and words.master_port != default.get_default("master_port")
    return LaunchJob(
        program_of(words),
        determine_local_world_size(words.nproc_per_node),
        max_restarts=words.max_restarts,
        hang_seconds=words.hang_seconds or (HANG_SECONDS if words.max_restarts else 0.0),
        address=LOOPBACK if words.standalone else words.master_addr,
        port=int(words.master_port) if chosen else 0,
    )


def _asks_torchrun(words: argparse.Namespace, default: argparse.ArgumentParser) -> bool:
    """Whether there is a flag that only torchrun knows, or an environment variable in place of such a flag."""
    others = {name for name, value in vars(words).items() if name not in _OURS and value != default.get_default(name)}
    return bool(others) or any(name.startswith("PET_") for name in os.environ)
