"""``gptpar check-layouts``: proof, on this machine, that every layout computes the same."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from gptpar.adapter.user_module import is_named_in
from gptpar.cli.check_layouts import module_training
from gptpar.cli.check_layouts.compare import Comparison
from gptpar.cli.check_layouts.outcome import Outcome
from gptpar.cli.check_layouts.training import CaseRun
from gptpar.cli.flags import FACTS, add_flags
from gptpar.cli.launch import is_worker, start_workers, workers_wanted
from gptpar.config import Config
from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.errors import ConfigError
from gptpar.plan.space.candidate import Candidate, configured
from gptpar.plan.space.pairwise import pairwise
from gptpar.plan.space.spaces import to_prove
from gptpar.system.files import facts_in
from gptpar.topology.groups import Topology, make_topology
from gptpar.topology.mesh import Mesh
from gptpar.topology.world import open_world, world_from_environment

_SMALL = facts_in("models.toml", __file__)
SMALL: str = _SMALL["small"]
MODELS: dict[str, str] = _SMALL["models"]
"""Name -> a model's flags beside SMALL."""


def main(argv: list[str]) -> int:
    """Check, or start the workers that do."""
    if is_named_in(argv):
        return module_training.main(argv)
    if any(word.split("=", 1)[0] == "--config" for word in argv):
        raise ConfigError(
            [
                "--config: check-layouts trains a small model of its own, in every layout, not a run's: leave it out, "
                "and give the options in question as flags, such as --qk-layernorm; gptpar plan and gptpar benchmark "
                "take a run's configuration."
            ]
        )
    number_format = [] if {"--bf16", "--fp16", "--fp32", "--fp64"} & set(argv) else ["--fp64"]
    scale = ["--initial-loss-scale", "1024"] if "--fp16" in argv else []  # the usual first ones overflow for many steps
    typed = [*number_format, *scale, *(word for word in argv if word != "--fp32")]
    small = SMALL.split()
    parsed = _parsed([*small, *typed])
    count = parsed.rest.nproc or workers_wanted(parsed.flags.parallel.nproc_per_node)
    if parsed.flags.checkpoint.load_hf is not None:
        parsed.problems.append(
            f"--load-hf {parsed.flags.checkpoint.load_hf}: check-layouts trains a small model of its own, in every "
            f"layout, not a Hugging Face model: leave it out; --model {' or '.join(MODELS)} has such models' options."
        )
    if parsed.problems:
        raise ConfigError(parsed.problems)
    words = [*small, *MODELS[parsed.rest.model].split(), *typed]
    if is_worker():
        return _check_all(words, world_from_environment()[2], parsed.rest)
    _chosen(words, count, parsed.rest)
    return start_workers(count, ["check-layouts", *argv])


def _parsed(words: Sequence[str]) -> ParsedFlags:
    """The words without ``--config``, over whose file the small model's words would have precedence."""
    return parse_flags(
        words,
        prog="gptpar check-layouts",
        description=FACTS["check-layouts"]["description"],
        extra=partial(add_flags, verb="check-layouts", models=MODELS),
        takes_config=False,
    )


@dataclass(frozen=True)
class _Chosen:
    """The chosen model, variants and layouts.

    Attributes:
        cases: combinations, each with its configuration.
        left_out: why the configuration refuses other combinations -> their names.
    """

    cases: list[tuple[Candidate, Config]]
    left_out: dict[str, list[str]]

    def covered(self) -> _Chosen:
        """Few of the cases, with every pair of values."""
        kept = pairwise([case for case, _ in self.cases])
        return _Chosen([one for one in self.cases if one[0] in kept], self.left_out)


def _chosen(words: Sequence[str], num_processes: int, options: argparse.Namespace) -> _Chosen:
    """The combinations that the model and the flags allow.

    Raises:
        ConfigError: there is none, or one process cannot train the model.
    """
    case_config(words, Candidate(name="one process"), 1)
    only, found = options.only, _Chosen([], {})
    named = [case for case in to_prove(_parsed(words).flags, num_processes) if only is None or only in case.name]
    if not named:
        raise ConfigError([f"--only {only}: no combination of {num_processes} processes has these words in its name."])
    for case in named:
        try:
            found.cases.append((case, case_config(words, case, num_processes)))
        except ConfigError as error:
            reason = " ".join(problem.removeprefix(f"{case.name}: ") for problem in error.problems)
            found.left_out.setdefault(reason, []).append(case.name)
    if not found.cases:
        raise ConfigError([f"{_some(names)}: {reason}" for reason, names in found.left_out.items()])
    return found.covered() if options.pairwise else found


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def case_config(words: Sequence[str], case: Candidate, world_size: int) -> Config:
    """The case's configuration.

    Raises:
        ConfigError: the model cannot be divided like that.
    """
    typed = _parsed(words).flags
    try:
        config = configured(case.applied_to(typed), world_size)
    except ConfigError as error:
        raise ConfigError([f"{case.name}: {problem}" for problem in error.problems]) from None
    if config.batch.step_batch_size_schedule is not None:
        raise ConfigError(["check-layouts compares steps of one size: give --global-batch-size, and no schedule."])
    return config


def _check_all(words: Sequence[str], world_size: int, options: argparse.Namespace) -> int:
    """Run all cases, which every worker does in the same order; the main one compares and prints."""
    chosen, steps = _chosen(words, world_size, options), options.steps
    base = case_config(words, Candidate(name="one process"), 1)
    backend, minutes = base.parallel.distributed_backend, base.parallel.distributed_timeout_minutes
    with open_world(backend, minutes, lambda: {"the command line": " ".join(words)}) as (rank, device):
        folder = _shared_folder(rank, world_size)
        torch.set_num_threads(1)
        try:
            alone = _train_alone(base, rank, device, steps)
            comparison = Comparison(base.precision.dtype, steps, "one process", speaks=rank == 0)
            topologies: dict[Mesh, Topology] = {}
            saved: Path | None = None
            for number, (case, config) in enumerate(chosen.cases):
                if case.mesh not in topologies:
                    topologies[case.mesh] = make_topology(case.mesh, rank, device)
                run = CaseRun(config, topologies[case.mesh])
                run.train(0, steps)
                mine = folder / f"case{number}"
                run.save(mine, steps)
                if saved is not None:
                    run.resume(saved)
                    run.train(steps, steps + 1)
                    if rank == 0:
                        shutil.rmtree(saved)
                saved = mine
                run.trainer.close()
                comparison.compare(case.name, run.outcome, alone)
            failed = torch.tensor([comparison.num_failed])
            if world_size > 1:
                dist.broadcast(failed, 0)
        finally:
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
    comparison.sum_up()
    for reason, names in chosen.left_out.items() if rank == 0 else ():
        print(f"left out {_some(names)}: {reason}", flush=True)
    return int(failed.item() > 0)


def _shared_folder(rank: int, world_size: int) -> Path:
    names = [tempfile.mkdtemp(prefix="gptpar-layouts-") if rank == 0 else ""]
    if world_size > 1:
        dist.broadcast_object_list(names)
    return Path(names[0])


def _train_alone(config: Config, rank: int, device: torch.device, steps: int) -> Outcome:
    """The reference, on the main process."""
    if rank:
        return Outcome()
    run = CaseRun(config, Topology(Mesh(), 0, device))
    run.train(0, steps + 1)
    run.trainer.close()
    return run.outcome
