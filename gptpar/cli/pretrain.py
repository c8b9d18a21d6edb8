"""``gptpar pretrain``"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

from gptpar.cli.launch import is_worker, start_workers, workers_wanted
from gptpar.config import Config
from gptpar.config.derive import Derived
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.data.tokenizer import tokenizer_problems
from gptpar.reporting.guards import guarded_console
from gptpar.topology.world import world_from_environment
from gptpar.training.assemble import open_run
from gptpar.training.resume import folder_problems

DESCRIPTION = """Pretrain a GPT. Flags carry Megatron-LM's names and meanings. Without torchrun, one worker is started
for each visible GPU. Example: gptpar pretrain --preset 124M --mock-data --vocab-size 50257 --micro-batch-size 4
--train-iters 10 --lr 3e-4"""


def tokenizer_checks(config: Config) -> Iterable[str]:
    """Problems of the tokenizer's flags and files."""
    t = config.tokenizer
    return [] if t.tokenizer_type is None else tokenizer_problems(t.tokenizer_type, **t.options)


def start_checks(config: Config) -> Iterable[str]:
    """Problems of the tokenizer, and of folders that hold checkpoints of others."""
    return [*tokenizer_checks(config), *folder_problems(config)]


def pretrain(config: Config, derived: Sequence[Derived], without_effect: Sequence[str]) -> signal.Signals | None:
    """Train (unless ``--skip-train``), then evaluate on validation and test data.

    Returns:
        The signal that ended the run early, if one did.
    """
    with guarded_console(), open_run(config, derived, without_effect) as run:
        if not config.logging.skip_train:
            if run.plan.finished(run.progress):
                run.say(f" > nothing left to train: iteration {run.progress.iteration} is the last")
            else:
                run.train()
        if not run.is_to_stop():
            run.evaluate("valid")
            run.evaluate("test")
        if run.is_to_stop():
            saved = f"; --load {config.checkpoint.save} goes on from here" if run.saved_at is not None else ""
            run.say(f" > stopped by {run.request.signal.name if run.request.signal else 'a signal'}{saved}")
        return run.request.signal


def main(argv: list[str]) -> int:
    """Validate, start workers if that is still to be done, and train."""
    parsed = parse_flags(argv, description=DESCRIPTION)
    worker = is_worker()
    count = world_from_environment()[2] if worker else workers_wanted(parsed.config.parallel.nproc_per_node)
    config, derived = resolve(parsed, count, more=start_checks)
    if count > 1 and not worker:
        return start_workers(count, ["pretrain", *argv])
    stopped_by = pretrain(config, derived, parsed.without_effect)
    # torchrun takes anything but 0 for a crash; a shell is told of the signal in the usual way.
    return 0 if stopped_by is None or worker else 128 + stopped_by
