"""Evaluates tasks during a pretraining run: their interval, and the records of their scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gptpar.config import Config
from gptpar.errors import ConfigError
from gptpar.reporting.records import TaskRecord, TaskScores
from gptpar.run.data import tokenizer_of
from gptpar.run.evaluation.evaluator import Evaluator
from gptpar.run.evaluation.tasks import Task, read_tasks
from gptpar.run.progress import Progress
from gptpar.run.trainer import Trainer


def tasks_of(config: Config) -> list[Task]:
    """The tasks of ``--eval-tasks``; none without the flag.

    Raises:
        ConfigError: malformed files, or a run without a tokenizer.
    """
    log = config.logging
    if not log.eval_tasks:
        return []
    tokenizer = tokenizer_of(config.tokenizer)
    if tokenizer is None:
        raise ConfigError(["--eval-tasks reads text: give --tokenizer-type and its files."])
    return read_tasks(log.eval_tasks, tokenizer, config.model.seq_length, log.eval_limit)


@dataclass
class TaskEvaluation:
    """Evaluates the tasks of a run.

    Attributes:
        report: takes each record.
        say: prints a line.
        stop: whether a process was asked to stop; all processes call it together.
    """

    tasks: Sequence[Task]
    trainer: Trainer
    report: Callable[[TaskRecord], None]
    say: Callable[[str], None]
    stop: Callable[[], bool]
    _done: set[tuple[str, int]] = field(default_factory=set)

    @property
    def interval(self) -> int | None:
        """Steps between evaluations; ``None`` without tasks."""
        log = self.trainer.config.logging
        return (log.eval_tasks_interval or log.eval_interval) if self.tasks else None

    def evaluate(self, progress: Progress) -> bool:
        """Report the scores of all tasks, unless those of this iteration are reported already.

        Returns:
            False if the evaluation was broken off because a process was asked to stop.
        """
        config, trainer = self.trainer.config, self.trainer
        evaluator = Evaluator(
            trainer.pipeline,
            trainer.topology,
            config.model.seq_length,
            config.batch.micro_batch_size * config.model.seq_length,
            trainer.activity.note,
        )
        for task in self.tasks:
            if (task.name, progress.iteration) in self._done:
                continue
            found = evaluator.evaluate(task, self.stop)
            if found is None:
                self.say(f" > left the evaluation on {task.name}")
                return False
            self._done.add((task.name, progress.iteration))
            self.report(self._record(found, progress))
        return True

    def _record(self, found: TaskScores, progress: Progress) -> TaskRecord:
        samples = progress.consumed_samples
        tokens = samples * self.trainer.config.model.seq_length
        return TaskRecord(**vars(found), iteration=progress.iteration, consumed_samples=samples, consumed_tokens=tokens)
