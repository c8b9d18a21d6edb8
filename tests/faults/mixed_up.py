"""Whole files and folders in the wrong place: swapped, renamed, from another run or time, left behind."""

import json
import os
import shutil
import time

from tests.faults.damage import goes_on_or_says_why, one_file
from tests.faults.fault import Failed, Kind, Measured, kind
from tests.faults.place import EXIT_LIMIT, Place
from tests.faults.prepared import STOPPED_AT

KINDS: list[Kind] = []


@kind(KINDS, one=3)
def swapped_pieces(place: Place) -> Measured:
    """Two checkpoints swap a file, or one of them gets a copy of the other's."""
    place.with_stopped_run()
    new, old = sorted(place.run_folder.glob("iter_*"), reverse=True)[:2]
    name = place.random.choice(sorted(path.name for path in new.iterdir() if path.is_file()))
    if place.random.random() < 0.5:
        (new / name).rename(place.folder / "between")
        (old / name).rename(new / name)
        if place.random.random() < 0.5:
            (place.folder / "between").rename(old / name)
        else:
            shutil.copy(new / name, old / name)
        running = place.train_to_end()
        if running.status == 0:
            place.equals_undisturbed(log=False)
        return Measured()
    shutil.copy(old / name, new / name)
    return goes_on_or_says_why(place, new / name)


@kind(KINDS, one=2)
def renamed_checkpoints(place: Place) -> Measured:
    """A checkpoint has the number of another iteration or of many digits, or lies inside another checkpoint."""
    place.with_stopped_run()
    new, old = sorted(place.run_folder.glob("iter_*"), reverse=True)[:2]
    case = place.random.randrange(4)
    if case == 0:
        new.rename(new.with_name(f"iter_{STOPPED_AT + place.random.randint(1, 99):07d}"))
    elif case == 1:
        shutil.copytree(old, old.with_name("iter_" + "9" * place.random.randint(7, 60)))
    elif case == 2:
        shutil.rmtree(new)
        shutil.copytree(old, new)
    else:
        shutil.copytree(old, new / old.name)
    return Measured(steps_lost=max(0, STOPPED_AT - place.resumed_at(place.finishes())))


@kind(KINDS, one=2)
def another_runs_checkpoint(place: Place) -> Measured:
    """The newest checkpoint is another run's, of other weights, seed, data order or learning rate."""
    place.with_stopped_run()
    flag = place.random.choice(("--lr 3e-3", "--seed 99", "--split 80,20,0", "--norm-epsilon 0.01", "--swiglu"))
    shutil.move(place.run_folder, place.folder / "mine")
    other = place.train_to_end(*flag.split(), "--exit-interval", "24", limit=EXIT_LIMIT[place.workers])
    stranger = place.run_folder / "iter_0000024"
    if other.status != 0 or not stranger.is_dir():
        if "error: " in other.text():
            return Measured()  # a flag that does not fit the model
        raise Failed("not whole", other.text()[-300:])
    shutil.move(stranger, place.folder / "mine" / stranger.name)
    shutil.rmtree(place.run_folder)
    shutil.move(place.folder / "mine", place.run_folder)
    running = place.train_to_end(limit=EXIT_LIMIT[place.workers])
    if running.status == 0:
        raise Failed("wrong continuation", f"another run's checkpoint ({flag}) was taken: {running.text()[:600]}")
    return Measured()


@kind(KINDS, one=2)
def other_times(place: Place) -> Measured:
    """The clock jumped: files of the run lie hours in the future, or years in the past."""
    path = one_file(place)
    for each in (path, *path.parents):
        if each == place.folder:
            break
        moment = time.time() + place.random.uniform(-1e9, 1e6)
        os.utime(each, (moment, moment))
    return goes_on_or_says_why(place, path)


@kind(KINDS, one=3)
def left_behind(place: Place) -> Measured:
    """Left-overs of dead runs, damaged: owner's files of any content, half a save, a draft of the marker file."""
    place.with_stopped_run()
    rng, run = place.random, place.run_folder
    dead = {"host": os.uname().nodename, "pid": 2**22 - 1, "started": "1"}
    texts = (
        json.dumps({"token": "a", "since": "2026-01-01", "process": dead}),
        json.dumps({"token": 5, "since": [], "process": {"host": None, "pid": "x"}}),
        json.dumps({"token": "a", "since": "x\x1b[31m\ny", "process": {**dead, "pid": -1}}),
        json.dumps({"token": "a", "since": "x", "process": {**dead, "pid": 10**30}}),
        "[" * 5000,
        "",
        "null",
        rng.randbytes(100).decode("latin-1"),
    )
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(("owner-1.json", "owner-7.json", f"owner-{10**25}.json", ".owner-abc.tmp"))
        (run / name).write_text(rng.choice(texts))
        os.utime(run / name, (time.time() - 1000, time.time() - 1000))
    half = run / f"iter_0000025.tmp-{os.uname().nodename}-{2**22 - 1}-00ff00ff"
    half.mkdir()
    (half / "rank00000.bin").write_bytes(rng.randbytes(rng.randint(0, 3000)))
    (run / ".latest_checkpointed_iteration.txt.tmp").write_text("2")
    place.say("runs run")
    return goes_on_or_says_why(place, run / "owner-1.json")
