"""Files of a stopped run that are damaged before it goes on: flipped bits, cut ends, other kinds of files."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from tests.faults.commands import Running
from tests.faults.fault import Failed, Kind, Measured, kind
from tests.faults.place import Place
from tests.faults.prepared import INTERVAL, STEPS, STOPPED_AT

KINDS: list[Kind] = []

LOGS = ("metrics.jsonl", "tensorboard", "latest_checkpointed_iteration.txt", ".verified", "cache")
"""Files and folders whose damage never ends a run."""

READERS = (
    "inspect run --verify",
    "inspect run",
    "runs run --verify",
    "summary run --data-path data/corpus_text_document",
    "generate --load run --prompt abc --num-tokens 8 --temperature 0 --device cpu",
    "plot run",
)
WEIGHTS = (4, 2, 3, 6, 4, 1)


def files_of(place: Place) -> list[Path]:
    """Every file that the run read or left."""
    paths = [path for path in sorted(place.folder.rglob("*")) if path.is_file()]
    return [path for path in paths if path.suffix not in (".jsonl", ".lock") or path.name == "metrics.jsonl"]


def one_file(place: Place, inside: tuple[str, ...] = ("run", "cache", "data")) -> Path:
    """A random file of a stopped run; each group of files has the same chance, because a run has many small files."""
    groups: dict[str, list[Path]] = {}
    for path in files_of(place.with_stopped_run()):
        parts = path.relative_to(place.folder).parts
        if parts[0] not in inside:
            continue
        groups.setdefault("/".join(parts[:2]) + path.suffix, []).append(path)
    return place.random.choice(groups[place.random.choice(sorted(groups))])


@kind(KINDS, one=15)
def flipped_bits(place: Place) -> Measured:
    """One to three bits of a random file are flipped."""

    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        for _ in range(place.random.randint(1, 3)):
            data[place.random.randrange(len(data))] ^= 1 << place.random.randrange(8)
        path.write_bytes(data)

    return _damaged(place, flip)


@kind(KINDS, one=12)
def cut_or_overwritten(place: Place) -> Measured:
    """A random file is truncated, filled with zeros in part, repeated, appended to, emptied, or removed."""

    def damage(path: Path) -> None:
        data, rng = path.read_bytes(), place.random
        at, more = rng.randrange(len(data) + 1), rng.randbytes(rng.randint(1, 5000))
        hole = data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]
        changed = rng.choice((data[:at], data[:at], hole, data + data, data + more, data[:at] + more, b"", None))
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)

    return _damaged(place, damage)


@kind(KINDS, one=6)
def other_kinds_of_file(place: Place) -> Measured:
    """In place of a random file: a pipe, a folder, a link to nowhere, to itself, or to a device."""

    def replace(path: Path) -> None:
        path.unlink()
        makers: tuple[Callable[[Path], object], ...] = (
            os.mkfifo,
            Path.mkdir,
            lambda p: p.symlink_to("nowhere"),
            lambda p: p.symlink_to(p.name),
            lambda p: p.symlink_to("/dev/zero"),
            lambda p: p.symlink_to("/dev/full"),
            lambda p: p.symlink_to("/dev/null"),
        )
        place.random.choice(makers)(path)

    return _damaged(place, replace, one_file(place, ("run", "cache")))  # a tokenizer may come through a pipe


def _damaged(place: Place, damage: Callable[[Path], None], path: Path | None = None) -> Measured:
    path = path or one_file(place)
    (words,) = place.random.choices(READERS, WEIGHTS)
    sound = place.say(words)
    place.expect(sound)
    before = path.read_bytes()
    damage(path)
    place.note(f"{path.relative_to(place.folder)} is damaged")
    changed = not path.is_file() or path.is_symlink() or path.read_bytes() != before
    _reads_right(place, words, sound.text(), path, changed)
    return goes_on_or_says_why(place, path)


def _reads_right(place: Place, words: str, told: str, path: Path, changed: bool) -> None:
    """A verb prints what it printed before the damage, or a warning or error, or names an older checkpoint."""
    running = place.say(words)
    place.expect(running, (0, 1), "traceback")
    text = running.text()
    name = path.relative_to(place.folder)
    is_data = path.parent.name == "tokenizer" or (path.parent.name.startswith("iter_") and path.suffix == ".bin")
    if words.endswith("--verify") and is_data and changed and running.status == 0:
        raise Failed("silent loss", f"gptpar {words} finds {name} sound: {text[-300:]}")
    if words.startswith(("summary", "generate")) and running.status == 0 and text != told and not _warns(text):
        if words.startswith("summary") and path.name == "metrics.jsonl" and _only_lacks_lines(path, place):
            return
        raise Failed("silent loss", f"gptpar {words} says {text[-300:]!r}, before {told[-300:]!r}")


def _only_lacks_lines(log: Path, place: Place) -> bool:
    """Whether the whole lines of a log are true: lines that a cut removed cannot be known."""
    true = set((place.prepared.stopped / "run" / "metrics.jsonl").read_bytes().split(b"\n"))
    return set(log.read_bytes().split(b"\n")[:-1]) <= true


def _warns(text: str) -> bool:
    words = ("damaged", "DAMAGED", "skipped a checkpoint", "arning", "is missing", "differs", "cannot")
    return any(word in text for word in words)


def goes_on_or_says_why(place: Place, path: Path) -> Measured:
    """The run goes on bit for bit, from an older checkpoint if need be, or is refused with a reason."""
    name = path.relative_to(place.folder)
    is_checkpoint = name.parts[0] == "run" and name.parts[1].startswith("iter_")
    is_log = any(part in LOGS for part in name.parts)
    running = place.train_to_end()
    if running.status == 0:
        # What was lost of the log cannot come back; what is there must be right.
        place.equals_undisturbed(log=False)
        _log_is_right(place, running)
    elif is_log or is_checkpoint:
        raise Failed("not whole", f"a damaged {name} stops the run: {running.text()[-500:]}")
    return Measured(steps_lost=_steps_lost(place, running, is_checkpoint))


def _steps_lost(place: Place, running: Running, is_checkpoint: bool) -> int:
    if running.status != 0:
        return 0
    lost = STOPPED_AT - place.resumed_at(running)
    allowed = STOPPED_AT % INTERVAL if is_checkpoint else 0
    if lost > allowed:
        raise Failed("work lost", f"{lost} steps, {allowed} are allowed: {running.text()[:300]}")
    return lost


def _log_is_right(place: Place, running: Running) -> None:
    """Each training line of the log has the undisturbed loss, once; lines are missing only with a warning."""
    file = place.run_folder / "metrics.jsonl"
    if not file.is_file():
        if not _warns(running.text()):
            raise Failed("silent loss", "there is no metrics.jsonl, and nothing was said")
        return
    lines = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    found = [(line["iteration"], line["lm_loss"]) for line in lines if "lm_loss" in line]
    wrong = [step for step in found if place.reference.losses.get(step[0]) != step[1]]
    if wrong:
        raise Failed("wrong continuation", f"metrics.jsonl says {wrong[:3]}")
    if len(dict(found)) != len(found):
        raise Failed("wrong continuation", "metrics.jsonl holds an iteration twice")
    if len(found) < STEPS and not _warns(running.text()) and max(dict(found), default=0) < STEPS:
        raise Failed("silent loss", f"metrics.jsonl holds {len(found)} of {STEPS} iterations, and nothing was said")
