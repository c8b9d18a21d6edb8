"""``gptpar pretrain``: trains a GPT."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gptpar.cli.flags import FACTS
from gptpar.cli.launch import is_worker, start_workers, workers_wanted
from gptpar.config import Config, Flags
from gptpar.config.fields import Derived
from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.config.run_file import FILE_NAME, write_run_file
from gptpar.config.validate import resolve
from gptpar.data.tokenizer import tokenizer_problems
from gptpar.errors import ConfigError, GptparError
from gptpar.exchange import missing_package, take_model_of_hf
from gptpar.run.assemble import open_run
from gptpar.run.checkpoint_args import with_checkpoint_args
from gptpar.run.evaluation.items import all_problems
from gptpar.run.recovery import continued, with_global_batch
from gptpar.run.resume import folder_problems
from gptpar.system.restart import note_stopped
from gptpar.topology.world import world_from_environment


def start_checks(flags: Flags) -> Iterator[str]:
    """Problems with the tokenizer and its export, folders of other programs' checkpoints, and files to evaluate on."""
    c, tokenizer = flags.checkpoint, flags.tokenizer
    if tokenizer.tokenizer_type is not None:
        yield from tokenizer_problems(tokenizer.tokenizer_type, **tokenizer.options)
    if c.save_hf_interval is not None:
        yield from missing_package(flags)
    if c.load or c.save:
        yield from folder_problems(c)
    if flags.logging.eval_tasks:
        yield from all_problems(flags.logging.eval_tasks)


def remaining(parsed: ParsedFlags, global_batch_size: int, at_start: int) -> Callable[[int], int]:
    """A function that returns how many workers can go on after a death, which may have taken a GPU with it.

    Fewer workers divide the same global batch: the data axis shrinks.

    Args:
        at_start: number of workers of the first start; if they share GPUs, or have none, all can go on.
    """
    gpus_at_start = torch.cuda.device_count()

    def left(count: int) -> int:
        gpus = torch.cuda.device_count()
        if gpus >= count or gpus_at_start < at_start:
            return count
        same_batch = dataclasses.replace(parsed, flags=with_global_batch(parsed.flags, global_batch_size))
        problems: list[str] = []
        for fewer in range(gpus, 0, -1):
            try:
                resolve(same_batch, fewer)
                return fewer
            except ConfigError as error:
                problems = problems or error.problems
        raise GptparError(
            f"{gpus} of {gpus_at_start} GPUs are left, and the run cannot go on there: {' '.join(problems)}"
        )

    return left


def pretrain(
    config: Config, derived: Sequence[Derived], without_effect: Sequence[str], typed: Mapping[str, Any] | None = None
) -> signal.Signals | None:
    """Train (unless ``--skip-train``), then evaluate on validation and test data.

    Args:
        derived, without_effect: for the start banner.
        typed: the flags that repeat the run, kept in its folder.

    Returns:
        The signal that ended the run early, if one did.
    """
    with open_run(config, derived, without_effect) as run:
        if not config.logging.skip_train:
            if run.plan.finished(run.progress):
                run.say(
                    f" > nothing left to train: iteration {run.progress.iteration} is the last; to train on, raise "
                    "--train-iters, and give --override-opt-param-scheduler if the schedule is to follow"
                )
            else:
                if typed is not None and run.trainer.topology.is_main and config.checkpoint.save:
                    _keep_flags(Path(config.checkpoint.save), typed)
                run.train()
        if not run.is_to_stop():
            run.evaluate("valid")
            run.evaluate("test")
            run.on_tasks.evaluate(run.progress)
        if run.is_to_stop():
            saved = f"; --load {config.checkpoint.save} goes on from here" if run.saving.has_saved else ""
            note_stopped()
            run.say(f" > stopped by {run.request.signal.name if run.request.signal else 'a signal'}{saved}")
        return run.request.signal


def _keep_flags(folder: Path, typed: Mapping[str, Any]) -> None:
    """Write the file with which ``--config`` repeats this run on as many processes; their number may decide batches."""
    processes = world_from_environment()[2]
    comment = f"""The flags of a run of {processes} process(es); paths are those of the folder where it was started.
With --config {folder / FILE_NAME}, gptpar pretrain repeats it into another --save, or goes on with --load {folder}."""
    write_run_file(folder, typed, comment)


def main(argv: list[str]) -> int:
    """Validate, start workers unless this is one, and train."""
    parsed = parse_flags(argv, description=FACTS["pretrain"]["description"])
    if folder := parsed.flags.checkpoint.load_hf:
        take_model_of_hf(parsed, folder)
    worker = is_worker()
    if worker:
        parsed = continued(parsed)
    count = world_from_environment()[2] if worker else workers_wanted(parsed.flags.parallel.nproc_per_node)
    if parsed.flags.checkpoint.load or parsed.flags.checkpoint.use_checkpoint_args:
        parsed = with_checkpoint_args(parsed)
    config, derived = resolve(parsed, count, more=start_checks)
    recovery = config.recovery
    if not worker and (count > 1 or recovery.max_restarts):
        return start_workers(
            count,
            ["pretrain", *argv],
            max_restarts=recovery.max_restarts,
            hang_seconds=recovery.hang_seconds,
            processes_left=remaining(parsed, config.batch.global_batch_size, count),
        )
    stopped_by = pretrain(config, derived, parsed.without_effect, None if config.logging.skip_train else parsed.typed)
    # torchrun takes anything but 0 for a crash; a shell learns of the signal in the usual way.
    return 0 if stopped_by is None or worker else 128 + stopped_by
