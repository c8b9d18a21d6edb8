"""What surrounds a process: limits, users, variables, descriptors, the clock, memory file systems, ports."""

import ctypes
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.commands import Running
from tests.faults.disks import SENTENCE, may_mount
from tests.faults.fault import Kind, Measured, kind
from tests.faults.held_out.folders import become_nobody
from tests.faults.place import Place
from tests.faults.prepared import training

KINDS: list[Kind] = []

CLONE_NEWNS = 0x20000
LOCALES = (
    *({"LC_ALL": "C"}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}, {"LC_ALL": "tr_TR.UTF-8"}, {"LANG": "nowhere"}),
    *({"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
)
PYTHONS = (
    *({"PYTHONOPTIMIZE": "2"}, {"PYTHONWARNINGS": "error"}, {"PYTHONSAFEPATH": "1"}, {"PYTHONDEVMODE": "1"}),
    *({"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}, {"OMP_NUM_THREADS": "many"}, {"OMP_NUM_THREADS": "0"}),
    *({"CUDA_VISIBLE_DEVICES": "x"}, {"PYTHONMALLOC": "debug"}, {"COLUMNS": "0", "TERM": "dumb"}),
)
HOMES = (
    *({"HOME": "/nonexistent"}, {"HOME": "/dev/null"}, {"HOME": ""}, {"XDG_CACHE_HOME": "/dev/null"}),
    *({"TMPDIR": "/nonexistent"}, {"TMPDIR": "/dev/null"}, {"HOME": "/proc", "XDG_CACHE_HOME": "/proc", "USER": ""}),
)
LEFT_OVERS = {
    **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "NODE_RANK": "0", "TORCHELASTIC_RUN_ID": "x"},
    **{"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "OMPI_COMM_WORLD_RANK": "0"},
    **{"OMPI_COMM_WORLD_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"},
}
VALUES = ("", "0", "1", "3", "-1", "x", "1.5", " 0", "99999999999999999999", "nowhere.invalid", "\x1b[31m")


@kind(KINDS, one=4, four=1)
def few_open_files(place: Place) -> Measured:
    """ulimit -n: only a few files may be open at once."""
    most = place.random.randint(4, 130)
    return _limited(place, resource.RLIMIT_NOFILE, most)


@kind(KINDS, one=4)
def little_address_space(place: Place) -> Measured:
    """ulimit -v: a process gets little more memory than its code and libraries take."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return _limited(place, resource.RLIMIT_AS, used + place.random.randint(0, 400 << 20))


def _limited(place: Place, what: int, most: int) -> Measured:
    place.note(f"limit {what}: {most}")
    running = place.with_data().train(inside=lambda: resource.setrlimit(what, (most, most)))
    return _ends_and_goes_on(place, running)


def _ends_and_goes_on(place: Place, running: Running, limit: float | None = None, must_work: bool = False) -> Measured:
    """It ends by itself, with an error that is a sentence; the same command then finishes the run."""
    place.ended(running, limit)
    place.expect(running, (0,) if must_work else SENTENCE, "not whole" if must_work else "traceback")
    return place.goes_on([running])


@kind(KINDS, one=3, four=1)
def few_threads(place: Place) -> Measured:
    """ulimit -u: the user may start few more threads and processes."""
    subprocess.run(["chmod", "-R", "a+rwX", str(place.with_data().folder)], check=True)
    most = place.random.randint(1, 6)

    def limit() -> None:
        become_nobody()
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))

    place.note(f"{most} processes")
    running = place.train(inside=limit, variables={"HOME": str(place.folder / "home")})
    return _ends_and_goes_on(place, running)


@kind(KINDS, one=2)
def little_time(place: Place) -> Measured:
    """ulimit -t: the system sends SIGXCPU when a process has used its seconds of processor time."""
    seconds = place.random.randint(1, 2)
    running = place.with_data().train(
        "--eval-iters", "200", inside=lambda: resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 30))
    )
    place.ended(running, killed=True)
    return place.goes_on([running])


@kind(KINDS, one=3)
def other_locale(place: Place) -> Measured:
    """The locale is C, Turkish or missing, and standard output takes ASCII alone."""
    variables = place.random.choice(LOCALES)
    place.with_data().run_folder = place.folder / "rün"
    flags = ["--save", "rün", "--load", "rün"]
    place.note(str(variables))
    place.expect(place.train_to_end(*flags, "--exit-interval", "22", variables=variables, fresh=True))
    for words in (["runs", "rün"], ["generate", "--load", "rün", "--prompt", "ü漢", "--num-tokens", "4"]):
        place.say(words, variables=variables, fresh=True)
    place.finishes(*flags, variables=variables, fresh=True)
    return Measured()


@kind(KINDS, one=4)
def other_python(place: Place) -> Measured:
    """Variables that change how Python and its libraries behave: -O, warnings as errors, a debugging allocator."""
    return _with_variables(place, place.random.choice(PYTHONS), must_work=True)


@kind(KINDS, one=4, four=1)
def no_home(place: Place) -> Measured:
    """HOME, the cache folder or TMPDIR is missing, is no folder, or cannot be written."""
    variables = place.random.choice(HOMES)
    return _with_variables(place, variables, must_work="TMPDIR" not in variables)


@kind(KINDS, one=6)
def left_over_variables(place: Place) -> Measured:
    """Variables of another launcher are left over in the shell, whole or garbled."""
    names = place.random.sample(sorted(LEFT_OVERS), place.random.randint(1, len(LEFT_OVERS)))
    variables = {name: LEFT_OVERS[name] for name in names}
    for name in place.random.sample(names, min(len(names), place.random.randint(0, 2))):
        variables[name] = place.random.choice(VALUES)
    return _with_variables(place, variables, must_work=False)


def _with_variables(place: Place, variables: dict[str, str], *, must_work: bool) -> Measured:
    place.note(str(variables))
    running = place.with_data().train("--distributed-timeout-minutes", "0.2", variables=variables, fresh=True)
    return _ends_and_goes_on(place, running, 120.0, must_work)


@kind(KINDS, one=5, four=1)
def lost_output(place: Place) -> Measured:
    """Standard input, output or error is closed, is a pipe that nobody reads any more, or a full device."""
    rng, case = place.random, place.random.randrange(3)
    targets = rng.sample((0, 1, 2), rng.randint(1, 3))

    def lose() -> None:
        for target in targets:
            if case == 0:
                os.close(target)
                continue
            if case == 1:
                reading, source = os.pipe()
                os.close(reading)
            else:
                source = os.open("/dev/full", os.O_RDWR)
            os.dup2(source, target)

    place.note(f"{('closed', 'broken pipe', 'full device')[case]}: {targets}")
    running = place.with_data().train(inside=lose, fresh=True)
    seconds = place.ended(running, mute=True)
    if case == 0:
        place.expect(running)
    place.expect(running, (*SENTENCE, 128 + signal.SIGPIPE), "traceback")
    return place.goes_on([running], seconds=seconds)


@kind(KINDS, one=3, four=1)
def reader_goes_away(place: Place) -> Measured:
    """The program that reads what the run prints ends after some lines, as head does: the run itself goes on."""
    reading, writing = os.pipe()
    running = place.with_data().train(inside=lambda: (os.dup2(writing, 1), os.dup2(writing, 2), os.close(reading)))
    os.close(writing)
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        read = pipe.read(place.random.randint(1, 8000))
    place.over(running)
    place.note(f"it read {read[-200:]!r}")
    place.expect(running, (*SENTENCE, 128 + signal.SIGPIPE), "traceback")
    return place.goes_on([running])


@kind(KINDS, one=4)
def other_umask(place: Place) -> Measured:
    """An unusual umask: files are born unreadable, or open to everybody."""
    mask = place.random.choice((0o777, 0o277, 0o477, 0o000, 0o077, 0o007, 0o177))
    subprocess.run(["chmod", "-R", "a+rwX", str(place.with_data().folder)], check=True)

    def mask_files() -> None:
        become_nobody()
        os.umask(mask)

    place.note(f"umask {mask:o}")
    running = place.train(inside=mask_files, variables={"HOME": str(place.folder / "home")})
    return _ends_and_goes_on(place, running)


@kind(KINDS, one=3)
def stepped_clock(place: Place) -> Measured:
    """The clock is set years back or ahead while the run trains, as a time service does with a wrong machine."""
    after, step = place.random.uniform(0, 2), place.random.choice((-1e9, -3600.0, -5.0, 5.0, 3600.0, 1e9))

    def set_clock() -> None:
        real, began = time.time, time.monotonic()
        time.time = lambda: real() + (step if time.monotonic() - began > after else 0.0)

    place.note(f"the clock steps {step:g} s")
    more = ("--exit-duration-in-mins", "5", "--save-interval-minutes", "2")
    place.with_data().finishes(*more, inside=set_clock)
    return Measured()


@kind(KINDS, one=3, four=1)
def no_working_folder(place: Place) -> Measured:
    """The folder in which the command was started is removed, before it starts or while it runs."""
    here = place.with_data().folder / "here"
    here.mkdir()
    words = [str(place.folder / word) if word in ("run", "cache") else word for word in training(place.workers)]
    words = [str(place.folder / word) if word.startswith("data/") else word for word in words]
    before = place.random.random() < 0.5
    running = place.start(words, inside=lambda: (os.chdir(here), before and here.rmdir()), fresh=place.workers == 1)
    if not before:
        place.moment(running)
        here.rmdir()
    return _ends_and_goes_on(place, running)


@kind(KINDS, one=3, four=1)
def little_shared_memory(place: Place) -> Measured:
    """/dev/shm is small, cannot be written, or is missing, and the run keeps copies in memory."""
    if not may_mount():
        return few_open_files(place)
    options = place.random.choice(
        (f"size={place.random.randint(4, 600)}k", "size=16m,ro", "size=16m,nr_inodes=4", "size=16m,mode=0555")
    )
    place.note(f"/dev/shm: {options}")
    libc = ctypes.CDLL(None, use_errno=True)

    def mount() -> None:
        assert libc.unshare(CLONE_NEWNS) == 0
        for command in (["mount", "--make-rprivate", "/"], ["mount", "-t", "tmpfs", "-o", options, "shm", "/dev/shm"]):
            subprocess.run(command, check=True)

    running = place.with_data().train("--max-restarts", "2", "--mirror-interval", "3", inside=mount)
    return _ends_and_goes_on(place, running)


@kind(KINDS, two=1)
def taken_port(place: Place) -> Measured:
    """The port of the rendezvous is in use: by a program that never answers, or one that talks something else."""
    words = ["launch", "--nproc-per-node", str(place.workers), "--master-port"]
    train = [word for word in training(place.workers) if word not in ("--nproc-per-node", str(place.workers))]
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        running = place.with_data().start([*words, port, "-m", "gptpar", *train], fresh=True)
        place.ended(running)
    place.expect(running, (1, 2))
    return place.goes_on([running])


@kind(KINDS, one=3)
def cache_folders_gone(place: Place) -> Measured:
    """The index cache or the folder of compiled code is removed, or replaced by a file, while the run goes on."""
    cache = place.folder / "cache"
    running = place.with_data().train("--tensorboard-dir", "tensorboard")
    place.moment(running)
    victims: list[Callable[[], object]] = [
        lambda: shutil.rmtree(cache, ignore_errors=True),
        lambda: shutil.rmtree(place.folder / "tensorboard", ignore_errors=True),
        lambda: (place.run_folder / "metrics.jsonl").unlink(missing_ok=True),
    ]
    place.random.choice(victims)()
    place.ended(running)
    place.expect(running)
    place.equals_undisturbed(log=False)
    return Measured()
