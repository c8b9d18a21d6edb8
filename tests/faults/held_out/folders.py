"""What people and file systems do to the folders of a run."""

import os
import shutil
import subprocess
from pathlib import Path

from tests.faults.damage import goes_on_or_says_why
from tests.faults.disks import may_mount, small_file_system
from tests.faults.fault import Failed, Kind, Measured, kind
from tests.faults.place import Place
from tests.faults.prepared import INTERVAL, STEPS, STOPPED_AT

KINDS: list[Kind] = []

NOBODY = 65534
NAMES = (
    *("run two  words", "run\nline", "run\ttab", "run'quote\"s", "run\x1b[31mred", "-run", "run%s{0}$HOME", "run[1]*?"),
    *("r" * 200, "ü\u202e漢字", b"run\xff\xfe".decode(errors="surrogateescape"), "a/" * 100 + "run", "iter_0000005"),
)


@kind(KINDS, one=4)
def copied_by_halves(place: Place) -> Measured:
    """The newest checkpoint is a copy that broke off: files are missing, one has a copying program's temporary name."""
    place.with_stopped_run()
    newest = place.newest_checkpoint()
    files = sorted(path for path in newest.iterdir() if path.is_file())
    place.random.shuffle(files)
    count = place.random.randint(1, len(files))
    for path in files[1:count]:
        path.unlink()
    data = files[0].read_bytes()
    half = newest / f".{files[0].name}.{place.random.choice(('Xq3vB1', 'part', 'filepart'))}"
    half.write_bytes(data[: place.random.randint(0, len(data))])
    files[0].unlink()
    place.say(place.random.choice(("runs run --verify", "inspect run --verify", "inspect run")))
    return goes_on_or_says_why(place, files[0])


@kind(KINDS, one=3)
def names_of_others(place: Place) -> Measured:
    """Copies, back-ups and left-overs of other programs lie beside the checkpoints, and have similar names."""
    place.with_stopped_run()
    newest, run = place.newest_checkpoint(), place.run_folder
    for name in place.random.sample(
        ("iter_0000022 (copy)", "iter_0000022~", "iter_0000022.bak", "ITER_0000025", "iter_0000022.tar.part"), 2
    ):
        shutil.copytree(newest, run / name)
    for name in place.random.sample(("iter_0000030", "lost+found", ".Trash-0", "iter_", "iter_-000001"), 2):
        (run / name).mkdir(mode=place.random.choice((0o755, 0)))
    for name in place.random.sample((".nfs000000000000a1", "._iter_0000022", "iter_0000031", "Thumbs.db", "core"), 2):
        (run / name).write_bytes(place.random.randbytes(100))
    place.say("runs run")
    place.say("inspect run")
    return _goes_on_where_it_was(place)


@kind(KINDS, one=3)
def linked_folders(place: Place) -> Measured:
    """The run folder or its newest checkpoint is a link to another place, or shares its files with a back-up."""
    place.with_stopped_run()
    newest, case = place.newest_checkpoint(), place.random.randrange(3)
    path = (place.run_folder, newest)[case % 2]
    elsewhere = place.folder / "elsewhere"
    if case < 2:
        path.rename(elsewhere)
        path.symlink_to(elsewhere)
    else:
        shutil.copytree(place.run_folder, elsewhere, copy_function=os.link)
    held = {file: file.read_bytes() for file in elsewhere.rglob("iter_*/*") if file.is_file()}
    place.say("runs run")
    measured = _goes_on_where_it_was(place)
    if case == 2 and {file: file.read_bytes() for file in held} != held:
        raise Failed("not whole", "the back-up's checkpoints were changed")
    return measured


def _goes_on_where_it_was(place: Place, *more: str) -> Measured:
    """The stopped run finishes, and trains no step again."""
    running = place.finishes(*more)
    if (resumed := place.resumed_at(running)) != STOPPED_AT:
        raise Failed("work lost", f"it went on from {resumed}, not from {STOPPED_AT}: {running.text()[:500]}")
    return Measured()


@kind(KINDS, one=5, four=1)
def moved_meanwhile(place: Place) -> Measured:
    """The run folder is renamed while the run writes, or a link to it gets another target; perhaps back again."""
    run, away, other = place.run_folder, place.folder / "away", place.folder / "other"
    place.with_data()
    is_link = place.random.random() < 0.5
    if is_link:
        away.mkdir()
        other.mkdir()
        run.symlink_to(away)
    running = place.train()
    place.moment(running)
    if is_link:
        _point(run, other)
    elif run.exists():
        run.rename(away)
    if place.random.random() < 0.5:
        running.sleep(place.random.uniform(0, 0.3))
        if is_link:
            _point(run, away)
        elif away.exists() and not run.exists():
            away.rename(run)
    seconds = place.ended(running)
    folders = [folder for folder in (run, away, other) if folder.is_dir()]
    found = {_newest(folder): folder for folder in folders}
    if place.saved_at(running) > max(found, default=0):
        raise Failed("silent loss", f"{place.saved_at(running)} was said to be saved; there are {found}")
    if running.status == 0 and max(found, default=0) < STEPS:
        raise Failed("silent loss", f"exit status 0 without the last checkpoint: {running.text()[-300:]}")
    best = found.get(max(found, default=0), run)
    if best != run and best.exists():
        run.unlink() if run.is_symlink() else shutil.rmtree(run, ignore_errors=True)
        best.rename(run)
    place.finishes(log=False)
    return Measured(seconds_to_exit=seconds)


def _point(link: Path, target: Path) -> None:
    new = link.with_name("new-link")
    new.symlink_to(target)
    new.replace(link)


def _newest(folder: Path) -> int:
    numbers = [path.name.removeprefix("iter_") for path in folder.glob("iter_*") if (path / "manifest.json").is_file()]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


@kind(KINDS, one=5, four=1)
def removed_meanwhile(place: Place) -> Measured:
    """Someone deletes the run folder, or the checkpoint that is being written, while the run goes on."""
    running = place.with_data().train()
    whole = place.random.random() < 0.5
    place.moment(running)
    for _ in range(place.random.randint(1, 4)):
        for path in [place.run_folder] if whole else list(place.run_folder.glob("*.tmp*")):
            shutil.rmtree(path, ignore_errors=True)
        running.sleep(place.random.uniform(0, 0.1))
    reached = place.steps_told(running)
    seconds = place.ended(running)
    if running.status == 0 and _newest(place.run_folder) < STEPS and reached < STEPS - INTERVAL:
        raise Failed("silent loss", f"exit status 0 without the last checkpoint: {running.text()[-300:]}")
    place.finishes(log=False)
    return Measured(seconds_to_exit=seconds)


@kind(KINDS, one=4)
def two_runs_in_turns(place: Place) -> Measured:
    """Another run is given the same folder while the first one rests: it is refused, and the first goes on."""
    place.with_stopped_run()
    flags = place.random.choice(
        ("--seed 7", "--lr 3e-3", "--hidden-size 32", "--num-layers 3", "--load nowhere", "--seq-length 32", "--swiglu")
    )
    other = place.train_to_end(*flags.split())
    if other.status == 0:
        raise Failed("wrong continuation", f"{flags} goes on in another run's folder: {other.text()[:500]}")
    return _goes_on_where_it_was(place)


@kind(KINDS, one=5)
def read_only(place: Place) -> Measured:
    """Folders or files of the run cannot be written, read or opened by the user that goes on with it."""
    place.with_stopped_run()
    subprocess.run(["chmod", "-R", "u+rwX,go+rX", str(place.folder)], check=True)
    under = place.folder / place.random.choice(("run", "run", ".", "run/metrics.jsonl", "run/iter_0000022", "data"))
    mode = place.random.choice(("a-w", "a-w", "a-rwx", "a-x"))
    recursive = place.random.random() < 0.5
    if os.getuid() == 0:
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", str(place.folder)], check=True)
    subprocess.run(["chmod", *(["-R"] if recursive else []), mode, str(under)], check=True)
    place.note(f"chmod {mode} {under.name}{' -R' if recursive else ''}")
    running = place.train(inside=become_nobody, variables={"HOME": str(place.folder / "home")})
    place.ended(running)
    if running.status == 0 and _newest(place.run_folder) < STEPS:
        raise Failed("silent loss", f"exit status 0 without the last checkpoint: {running.text()[-300:]}")
    subprocess.run(["chmod", "-R", "u+rwX", str(place.folder)], check=True)
    return place.goes_on([running])


def become_nobody() -> None:
    """Give up the rights of root, for which no mode counts."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@kind(KINDS, one=6)
def strange_names(place: Place) -> Measured:
    """The path of the run folder holds spaces, line ends, control characters, other alphabets, or is very long."""
    name = place.random.choice(NAMES)
    place.with_data().run_folder = place.folder / name
    flags = [f"--save={name}", f"--load={name}", "--tensorboard-dir", str(Path(name) / "tensorboard")]
    place.note(repr(name))
    place.expect(place.train_to_end(*flags, "--exit-interval", str(STOPPED_AT)))
    for words in (["runs", f"./{name}"], ["inspect", f"./{name}", "--verify"], ["summary", f"./{name}"]):
        place.say(words)
    return _goes_on_where_it_was(place, *flags)


@kind(KINDS, one=3, four=1)
def few_files_left(place: Place) -> Measured:
    """The file system of the run folder has room, but takes only a few more files (inodes)."""
    if not may_mount():
        return names_of_others(place)
    place.with_data()
    place.run_folder.mkdir()
    with small_file_system(place.run_folder, f"size=16m,nr_inodes={place.random.randint(2, 30)}") as remount:
        running = place.train()
        seconds = place.ended(running)
        remount("nr_inodes=1000")
        return place.goes_on([running], seconds=seconds)
