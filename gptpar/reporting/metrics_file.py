"""Writes and reads ``metrics.jsonl``, the run's history: one strict JSON object in each line.

A training line holds the keys that ``iteration_object`` lists. An evaluation line holds ``iteration``,
``consumed_samples``, ``consumed_tokens`` and either ``validation_loss`` or ``test_loss``. A task's line holds ``task``
(its name), its scores, ``num_items``, ``num_tokens`` and ``seconds``. NaN and infinities are null. Lines are in order
of iteration, and no training iteration occurs twice, however often the run was resumed. Each line ends with the
CRC-32 of the text before it (``crc32``, in hexadecimal), so that a flipped bit is never taken for a measurement. A line
without a CRC-32, as other programs write, is accepted as it is.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import IO, Any

from gptpar.errors import GptparError
from gptpar.reporting.records import IterationRecord, TaskRecord, ValidationRecord
from gptpar.system.files import atomic_output, open_regular, read_regular

FILE_NAME = "metrics.jsonl"
TAIL_BYTES = 1 << 16
"""Bytes that are read at a file's end: more than a line has."""
MAX_LINE_BYTES = 1 << 20
"""Bytes that a line may have: a file with a hole may claim a line of a terabyte."""
_SUMMED = re.compile(r'(.*), "crc32": "([^"]*)"\}\s*', re.DOTALL)
"""A line with its checksum."""


def iteration_object(record: IterationRecord) -> dict[str, Any]:
    """The JSON object of a training iteration."""
    times = record.cpu_optimizer
    waits = {} if times is None else {"cpu_optimizer_wait_ms": times.waited, "cpu_optimizer_busy_ms": times.busy}
    restarts = {"restarts": record.restarts} if record.restarts else {}
    return {
        **waits,
        **restarts,
        **_values(record, "iteration consumed_samples consumed_tokens lm_loss"),
        **record.auxiliary_losses,
        **_values(record, "grad_norm learning_rate"),
        "iteration_time_ms": record.elapsed_ms,
        **_values(record, "tokens_per_s mfu mfu_causal global_batch_size loss_scale"),
        "skipped_iterations": record.num_skipped,
        "nan_iterations": record.num_nan,
        **_outlier(record),
        **record.layer_norms,
    }


def _values(record: object, names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names.split()}


def _outlier(record: IterationRecord) -> dict[str, Any]:
    """The number of outliers, if they are skipped; if there is one, its batch: ``samples`` from ``first_sample`` on."""
    if not record.num_outliers:
        return {} if record.num_outliers is None else {"outlier_iterations": 0}
    batch = {"first_sample": record.first_sample, "samples": record.global_batch_size}
    return {"outlier_iterations": record.num_outliers, "outlier_batch": batch}


def evaluation_object(record: ValidationRecord | TaskRecord) -> dict[str, Any]:
    """The JSON object of an evaluation, or of a task's scores."""
    found = _values(record, "iteration consumed_samples consumed_tokens")
    if isinstance(record, ValidationRecord):
        return {**found, f"{record.split}_loss": record.loss}
    return {**found, "task": record.task, **record.scores, **_values(record, "num_items num_tokens seconds")}


def json_line(values: dict[str, Any]) -> str:
    """``values``, at least one, with their CRC-32 as a line of strict JSON; NaN and infinities become null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    text = json.dumps(finite, allow_nan=False).removesuffix("}")
    return f'{text}, "crc32": "{_sum(text)}"}}\n'


def _sum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All objects of the file, in order; a last line that a crash left without its end is skipped.

    Raises:
        GptparError: there is no such file, or a line is no JSON object with an ``iteration``; it names the line.
    """
    try:
        lines = read_regular(path).decode(errors="replace").split("\n")
    except FileNotFoundError:
        raise GptparError(
            f"{path} does not exist: name the folder of a run (its --save folder) or a {FILE_NAME} file"
        ) from None
    return [_parse_line(path, number, line) for number, line in enumerate(lines[:-1], 1)]


def _parse_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        return _parse(line)
    except ValueError as error:
        raise GptparError(f"{path}, line {number} {error}; repair or delete the line") from None


def _parse(line: str) -> dict[str, Any]:
    """The object of a line.

    Raises:
        ValueError: the line holds none; the message is the end of the sentence "line 7 ...".
    """
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error}): {line[:60]!r}") from None
    if not isinstance(values, dict) or not isinstance(values.get("iteration"), int):
        raise ValueError(f"is not an object with an integer 'iteration': {line[:60]!r}")
    if "crc32" in values:
        summed = _SUMMED.fullmatch(line)
        if summed is None or summed[2] != _sum(summed[1]):
            raise ValueError(f"is not as it was written, by its CRC-32: {line[:60]!r}")
        del values["crc32"]
    return values


def prepare(path: Path, resume_iteration: int, report: Callable[[str], None] = print) -> None:
    """Prepare the file for a run that goes on after ``resume_iteration``, atomically; damage to it stops no run.

    Lines of later iterations are dropped, because the resumed run writes them again. A run that starts from iteration 0
    renames an older run's file to the first free ``metrics.N.jsonl``.

    Args:
        report: takes a sentence about lines that cannot be read, or about a pipe, folder or device of this name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    if not path.is_file():
        path.rename(aside := _first_free(path, "damaged-"))
        report(f"{path} is no regular file: it is {aside} now, and the history begins anew")
    elif resume_iteration == 0:
        path.rename(_first_free(path, ""))
    else:
        cut_after(path, resume_iteration, report)


def cut_after(path: Path, iteration: int, report: Callable[[str], None] = print) -> None:
    """Drop the lines of later iterations and unreadable ones, atomically, with one line in memory at a time.

    A file with unreadable lines is kept as ``metrics.damaged-N.jsonl``, and reported. A last line that a
    crash left without its end does not count as damage.
    """
    aside: Path | None = None
    try:
        with open_regular(path) as old, atomic_output(path, path.with_name(path.name + ".tmp")) as new:
            damage = _copy_until(old, new, iteration)
            if damage:
                _keep(path, aside := _first_free(path, "damaged-"))
    except OSError:  # the file stays as it is, and needs no second name
        if aside is not None:
            aside.unlink(missing_ok=True)
        raise
    if damage:
        more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
        report(f"{path}: {damage[0]}{more}; the readable lines are kept, the file as it was is {aside}")


def last_iteration(path: Path) -> int | None:
    """The iteration of the last complete line, from the file's end alone; None if it cannot be read."""
    try:
        if not path.is_file():
            return None
        with open_regular(path) as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            line = file.read().split(b"\n")[-2]
        return int(_parse(line.decode(errors="replace"))["iteration"])
    except (OSError, IndexError, ValueError):
        return None


def _copy_until(old: IO[bytes], new: IO[bytes], iteration: int) -> list[str]:
    """Copy the readable lines up to ``iteration``; returns what is wrong with the others."""
    damage, reached, trained = [], 0, 0
    for number, line in enumerate(iter(lambda: old.readline(MAX_LINE_BYTES), b""), 1):
        if len(line) == MAX_LINE_BYTES:
            damage.append(f"line {number} is longer than {MAX_LINE_BYTES:,} bytes, and nothing after it is read")
        if not line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
            break
        try:
            values = _parse(line[:-1].decode(errors="replace"))
            at, is_training = values["iteration"], "lm_loss" in values
            if at < reached or (is_training and at <= trained):
                raise ValueError(f"goes back to iteration {at} after {reached}")
            reached, trained = at, at if is_training else trained
            if at <= iteration:
                new.write(line)
        except ValueError as error:
            damage.append(f"line {number} {error}")
    return damage


def _keep(path: Path, name: Path) -> None:
    """Give the file a second name, which stays when another file takes the first; without hard links, copy it."""
    try:
        os.link(path, name)
    except OSError:  # a file system without hard links
        try:
            shutil.copy2(path, name)
        except OSError:
            name.unlink(missing_ok=True)
            raise


def _first_free(path: Path, word: str) -> Path:
    """``metrics.1.jsonl``, or the same with the first free number."""
    names = (path.with_name(f"{path.stem}.{word}{number}{path.suffix}") for number in count(1))
    return next(name for name in names if not name.exists())
