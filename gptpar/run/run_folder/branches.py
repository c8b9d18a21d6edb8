"""Branches: when a run goes back, its later checkpoints and logs are moved into a run folder of their own.

    root/branches/1-from-0000010/iter_0000020/    the checkpoints after iteration 10, each moved by one rename
    root/branches/1-from-0000010/metrics.jsonl    the whole history up to there
    root/branches/1-from-0000010/tensorboard/     likewise, where TensorBoard's files are inside the run's folder
    root/branches/1-from-0000010/branch.json      where it begins, and whether all of it has been moved

In ``root`` only what comes up to iteration 10 remains, so its numbers are those of one run again. The branch is first
made ready under another name, with copies of the histories; a rename then decides that the run goes back. A run
that is killed before the rename has changed nothing. If it is killed later, the folder's next owner does the rest.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gptpar.checkpoint import folders, proofs
from gptpar.reporting import event_files, metrics_file
from gptpar.system.files import read_regular, replace_synced, sync_directory, sync_file

FOLDER_NAME = "branches"
JOURNAL_NAME = "branch.json"
TENSORBOARD_NAME = "tensorboard"

MAX_NAMED = 8
"""Checkpoints listed one by one."""

_BRANCH = re.compile(r"(\d+)-from-(\d{7,})")
_STAGED = re.compile(r"\.new-[0-9a-f]+")


@dataclass(frozen=True)
class Journal:
    """A branch's ``branch.json``.

    Attributes:
        iteration: up to which the run's folder keeps its history; -1 if it keeps nothing.
        consumed_samples: by then.
        checkpoints: that belong to the branch, as iterations.
        tensorboard: the event files' folder, relative to the run's folder; None if there is none inside it.
        damaged: whether the run went back because none of the checkpoints was whole.
        complete: whether everything has been moved.
    """

    iteration: int
    consumed_samples: int
    checkpoints: tuple[int, ...]
    tensorboard: str | None = None
    damaged: bool = False
    complete: bool = False


def find_branches(root: str | Path) -> list[tuple[int, Path]]:
    """(number, path) of every branch, in the order in which they were left."""
    folder = Path(root) / FOLDER_NAME
    entries = list(folder.iterdir()) if folder.is_dir() else []
    return sorted((int(match[1]), path) for path in entries if (match := _BRANCH.fullmatch(path.name)))


def begins_at(branch: Path) -> int:
    """The iteration that the run went back to when it left this branch."""
    match = _BRANCH.fullmatch(branch.name)
    assert match is not None
    return int(match[2])


def how_to_go_on(branch: Path) -> str | None:
    """The flags with which a run goes on where the branch ends; None if no checkpoint of it is known to be whole."""
    journal = read_journal(branch)
    damaged = journal.checkpoints if journal is not None and journal.damaged else ()
    found = folders.find_checkpoints(branch)
    if all(number in damaged or proofs.known_problems(number, path) for number, path in found):
        return None
    path = shlex.quote(str(branch))
    return f"--load {path} --save {path}"


def branch_with(root: str | Path, iteration: int | None) -> Path | None:
    """The branch that was left last of those that hold a checkpoint of this iteration (None: any checkpoint)."""
    for _, branch in reversed(find_branches(root)):
        if any(iteration in (None, number) for number, _ in folders.find_checkpoints(branch)):
            return branch
    return None


def leave_branch(
    root: Path,
    iteration: int,
    consumed_samples: int,
    tensorboard: Path | None,
    say: Callable[[str], None],
    *,
    damaged: bool = False,
) -> None:
    """Move the checkpoints after ``iteration`` out of the run's folder, with the history that led to them.

    Args:
        root: the run's folder, which this process owns.
        iteration: that the run goes on from; -1 to begin anew.
        tensorboard: where this run's event files are. Outside ``root`` other runs may write there: nothing is touched.
        say: called with a sentence about what was moved where, if anything was.
        damaged: the later checkpoints could not be loaded.
    """
    beyond = sorted(number for number, _ in folders.find_checkpoints(root) if number > iteration)
    if not beyond:
        return
    inside = None
    if tensorboard is not None and is_inside(tensorboard, root):
        inside = str(tensorboard.resolve().relative_to(root.resolve()))
    journal = Journal(iteration, consumed_samples, tuple(beyond), inside, damaged)
    branch = _publish(root, journal)
    _finish(root, branch, journal, say)
    what = f"checkpoint{'' if len(beyond) == 1 else 's'} {', '.join(map(str, beyond))}"
    if len(beyond) > MAX_NAMED:
        what = f"{len(beyond)} checkpoints, {beyond[0]} to {beyond[-1]}"
    histories = "metrics and TensorBoard files" if inside else "metrics"
    say(
        f" > this run goes on from iteration {max(0, iteration)}: what came after it ({what}, with {histories}) "
        f"was moved to {branch}{_advice(branch)}"
    )


def is_inside(tensorboard: Path, root: Path) -> bool:
    """Whether the event files are in the run's folder, and so this run's alone."""
    return tensorboard.resolve().is_relative_to(root.resolve())


def _advice(branch: Path) -> str:
    flags = how_to_go_on(branch)
    return f"; to go on from there: {flags}" if flags else " (damaged: no run can go on from there)"


def finish_branches(root: Path, say: Callable[[str], None]) -> None:
    """Finish for a run that was killed while it left a branch; the folder's owner calls this before it loads."""
    folder = root / FOLDER_NAME
    for staged in folder.iterdir() if folder.is_dir() else ():
        if _STAGED.fullmatch(staged.name):
            shutil.rmtree(staged, ignore_errors=True)
    for _, branch in find_branches(root):
        journal = read_journal(branch)
        if journal is not None and not journal.complete:
            _finish(root, branch, journal, say)
            say(
                f" > {branch} was completed: a run that went back to iteration {max(0, journal.iteration)} was killed "
                f"while it moved there what came after{_advice(branch)}"
            )


def read_journal(branch: Path) -> Journal | None:
    """The journal of a branch; None if it cannot be read."""
    try:
        values = json.loads(read_regular(branch / JOURNAL_NAME))
        numbers = tuple(map(int, values["checkpoints"]))
        inside = values.get("tensorboard")
        return Journal(
            int(values["iteration"]),
            int(values["consumed_samples"]),
            numbers,
            None if inside is None else str(inside),
            bool(values.get("damaged")),
            bool(values["complete"]),
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _publish(root: Path, journal: Journal) -> Path:
    """Make a branch with copies of the histories; nothing is moved yet, and it appears by one rename."""
    folder = root / FOLDER_NAME
    staged = folder / f".new-{secrets.token_hex(4)}"
    staged.mkdir(parents=True)
    try:
        history = root / metrics_file.FILE_NAME
        copies = [(history, staged / history.name)] if history.is_file() else []
        if journal.tensorboard is not None:
            events = event_files.event_files(root / journal.tensorboard)
            copies += [(file, staged / TENSORBOARD_NAME / file.name) for file in events]
        for source, copy in copies:
            copy.parent.mkdir(exist_ok=True)
            shutil.copy2(source, copy)
            with copy.open("rb") as file:
                sync_file(file)
        _write(staged, journal)
        number = max((number for number, _ in find_branches(root)), default=0) + 1
        branch = folder / f"{number}-from-{max(0, journal.iteration):07d}"
        folders.publish(staged, branch)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return branch


def _finish(root: Path, branch: Path, journal: Journal, say: Callable[[str], None]) -> None:
    """Move the checkpoints and cut the histories that remain. Each step may have been done before."""
    for number in journal.checkpoints:
        source, target = (folders.checkpoint_path(place, number) for place in (root, branch))
        if source.exists() and not target.exists():
            os.rename(source, target)
            proofs.move(source, target)
    history = root / metrics_file.FILE_NAME
    if journal.iteration > 0 and history.is_file():
        metrics_file.cut_after(history, journal.iteration, say)
    else:  # all of it is the branch's
        history.unlink(missing_ok=True)
    if journal.tensorboard is not None and is_inside(root / journal.tensorboard, root):  # whoever wrote the journal
        event_files.cut_after(root / journal.tensorboard, journal.iteration, journal.consumed_samples)
    for place in (root, branch):
        newest = next((number for number, _ in folders.find_checkpoints(place)), None)
        if newest is not None:
            folders.write_hint(place, newest)
        else:
            (place / folders.HINT_NAME).unlink(missing_ok=True)
        sync_directory(place)
    _write(branch, replace(journal, complete=True))


def _write(branch: Path, journal: Journal) -> None:
    replace_synced(branch / JOURNAL_NAME, json.dumps(asdict(journal)))
