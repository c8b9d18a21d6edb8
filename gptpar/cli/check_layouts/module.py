"""``gptpar check-layouts --module``: the proof for a user's own module."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

from gptpar.adapter.user_module import load_user_function
from gptpar.cli.check_layouts.compare import Comparison
from gptpar.cli.check_layouts.module_training import DTYPES, ModuleCheck, train_case, train_plainly
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.flags import parser_of
from gptpar.cli.launch import is_worker, start_workers, workers_wanted
from gptpar.errors import ConfigError
from gptpar.plan.space.candidate import Option
from gptpar.plan.space.spaces import to_prove_of_a_module
from gptpar.topology.world import open_world, world_from_environment

TIMEOUT_MINUTES = 30.0


def parser() -> argparse.ArgumentParser:
    """Flags of the verb for a module."""
    parser = parser_of("check-layouts --module")
    formats = parser.add_mutually_exclusive_group()
    for name in DTYPES:
        formats.add_argument(f"--{name}", dest="format", action="store_const", const=name, default="fp64")
    return parser


def main(argv: list[str]) -> int:
    """Check, or start workers that check: first one process, then two, and so on."""
    options = parser().parse_args(argv)
    make = load_user_function(options.module)
    if is_worker():
        count = world_from_environment()[2]
        return _check_all(ModuleCheck(make, options.format, count, options.steps), options.only)
    count = options.nproc or workers_wanted(None)
    numbers = [number for number in range(1, count + 1) if _chosen(number, options.only)]
    if not numbers:
        raise ConfigError([f"--only {options.only}: no combination of up to {count} processes has these words."])
    words = ["--module", options.module, "--steps", str(options.steps), f"--{options.format}"]
    words += [] if options.only is None else ["--only", options.only]
    for number in numbers:
        status = start_workers(number, ["check-layouts", *words])
        if status:
            return status
    return 0


def _chosen(processes: int, only: str | None) -> list[Option]:
    return [case for case in to_prove_of_a_module(processes) if only is None or only in case.name]


def _check_all(check: ModuleCheck, only: str | None) -> int:
    """Train in all ways, which every worker does in the same order; the main one compares and prints."""
    with open_world(None, TIMEOUT_MINUTES) as (rank, device):
        torch.set_num_threads(1)
        check.require_repeatable(device)
        reference = train_plainly(check, device) if rank == 0 else Outcome()
        comparison = Comparison(check.number_format, check.steps, "plain PyTorch", speaks=rank == 0, resumes=False)
        for case in _chosen(check.processes, only):
            comparison.compare(case.name, train_case(check, case), reference)
        failed = torch.tensor([comparison.num_failed])
        if check.processes > 1:
            dist.broadcast(failed, 0)
    comparison.sum_up()
    return int(failed.item() > 0)
