"""``metrics.jsonl``: the run's history as one strict JSON object a line.

A training line holds the keys that ``iteration_object`` lists, an evaluation line ``iteration``,
``consumed_samples``, ``consumed_tokens`` and either ``validation_loss`` or ``test_loss``. NaN and
infinities are null. Lines are in order of iteration and no training iteration appears twice, however often
the run was resumed.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from gptpar.errors import GptparError
from gptpar.reporting.records import IterationRecord, ValidationRecord

FILE_NAME = "metrics.jsonl"


def iteration_object(record: IterationRecord) -> dict[str, Any]:
    """The JSON object of a training iteration."""
    times = record.cpu_optimizer
    waits = {} if times is None else {"cpu_optimizer_wait_ms": times.waited, "cpu_optimizer_busy_ms": times.busy}
    return {
        **waits,
        "iteration": record.iteration,
        "consumed_samples": record.consumed_samples,
        "consumed_tokens": record.consumed_tokens,
        "lm_loss": record.lm_loss,
        "grad_norm": record.grad_norm,
        "learning_rate": record.learning_rate,
        "iteration_time_ms": record.elapsed_ms,
        "tokens_per_s": record.tokens_per_s,
        "mfu": record.mfu,
        "mfu_causal": record.mfu_causal,
        "global_batch_size": record.global_batch_size,
        "loss_scale": record.loss_scale,
        "skipped_iterations": record.num_skipped,
        "nan_iterations": record.num_nan,
    }


def validation_object(record: ValidationRecord) -> dict[str, Any]:
    """The JSON object of an evaluation."""
    return {
        "iteration": record.iteration,
        "consumed_samples": record.consumed_samples,
        "consumed_tokens": record.consumed_tokens,
        f"{record.split}_loss": record.loss,
    }


def json_line(values: dict[str, Any]) -> str:
    """``values`` as a line of strict JSON, which knows no NaN and no infinity."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All objects of the file, in order; a last line that a crash left without its end is passed over.

    Raises:
        GptparError: no such file, or a line that is not a JSON object with an ``iteration``; says which.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        raise GptparError(
            f"{path} does not exist: name the folder of a run (its --save folder) or a {FILE_NAME} file"
        ) from None
    return [_parse(path, number, line) for number, line in enumerate(lines[:-1], 1)]


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise GptparError(
            f"{path}, line {number} is not JSON ({error}): {line[:60]!r}; repair or delete the line"
        ) from None
    if not isinstance(values, dict) or not isinstance(values.get("iteration"), int):
        raise GptparError(
            f"{path}, line {number} is not an object with an integer 'iteration': {line[:60]!r}; "
            "repair or delete the line"
        )
    return values


def prepare(path: Path, resume_iteration: int) -> None:
    """Make the file ready to go on after ``resume_iteration``, atomically.

    Lines of later iterations are dropped, as the resumed run writes them again. A run that starts from
    iteration 0 moves an older run's file aside to the first free ``metrics.N.jsonl``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    if resume_iteration == 0:
        number = 1
        while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)
        return
    kept = [values for values in read_metrics(path) if values["iteration"] <= resume_iteration]
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text("".join(json_line(values) for values in kept), encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
