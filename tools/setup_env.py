"""Finds or makes a Python environment for this checkout and prints its interpreter; tools/setup_env.sh calls it.

It runs before anything is installed, so that it uses the standard library alone. In this order, it takes:

1. ``$PYTHON``, when set, if it has every dependency;
2. the checkout's ``.venv``, if complete (made by this script, or by its user);
3. ``python3``, if it has every dependency: used as it is, nothing is installed (unless ``$PYTHON`` is set);
4. else ``.venv`` is made, or completed, with the versions of constraints.txt.

``.venv/setup-stamp`` says what was installed, or ``unfinished``. An unfinished ``.venv`` is made again, because a
package that was installed in part may look complete to pip.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup-stamp"
LOG = VENV / "setup.log"
UNFINISHED = "unfinished"
# For each level the extras that it cannot do without, and those that a new .venv gets besides.
LEVELS = {"run": ([], []), "test": (["test"], ["hf", "zst"]), "dev": (["test", "dev"], ["hf", "zst"])}
COMPILE = "import compileall, site; [compileall.compile_dir(p, quiet=2, workers=0) for p in site.getsitepackages()]"
"""Compiles the installed packages on all cores; pip would compile one file after the other."""
FREE_GB_NEEDED = 2.0
LOCK_TIMEOUT_S = 1800


class SetupError(Exception):
    """An error whose message is one sentence for the user."""


def say(text: str) -> None:
    """Print to stderr, because stdout is for the interpreter's path."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def requirements(level: str, everything: bool) -> list[str]:
    """Requirement lines of pyproject.toml: those that ``level`` needs, or all that a new .venv gets."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed, besides = LEVELS[level]
    lines = list(project["project"]["dependencies"])
    for extra in needed + (besides if everything else []):
        lines += project["project"].get("optional-dependencies", {}).get(extra, [])
    if everything:
        lines += project["build-system"]["requires"]
    return [line for line in lines if not line.startswith("gptpar[")]  # an extra naming extras that we list ourselves


def missing(level: str) -> list[str]:
    """The requirements that the running interpreter does not meet; asks its metadata and imports nothing."""
    return [line for line in requirements(level, everything=False) if not _is_met(line)]


def _is_met(requirement: str) -> bool:
    name, _, minimum = requirement.replace(" ", "").partition(">=")
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if importlib.util.find_spec(name.replace("-", "_")) is None:
        return False
    return _release(installed) >= _release(minimum)


def _release(version: str) -> list[int]:
    """``2.11.0a0+local`` -> [2, 11, 0]"""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in numbers[0].split(".")] if numbers else []


def complete_interpreter(command: str, level: str) -> str | None:
    """The absolute path of ``command``'s interpreter if it has everything; otherwise prints what it lacks."""
    path = shutil.which(command)
    if path is None:
        return None
    probe = [path, str(Path(__file__).resolve()), level, "--probe"]
    done = subprocess.run(probe, capture_output=True, text=True)
    if done.returncode:
        return None  # older than 3.11, or broken
    executable, *lacking = done.stdout.splitlines()
    if lacking:
        say(f"{executable} lacks {', '.join(lacking)}")
    return None if lacking else executable


def fingerprint() -> str:
    """A text that changes when .venv must be updated: with versions, dependencies and the checkout's path."""
    content = (ROOT / "pyproject.toml").read_bytes() + (ROOT / "constraints.txt").read_bytes()
    return hashlib.sha256(content + str(ROOT).encode()).hexdigest()


def venv_is_complete(level: str) -> bool:
    with suppress(OSError, ValueError):
        stamp, done = STAMP.read_text().split()
        return stamp == fingerprint() and list(LEVELS).index(done) >= list(LEVELS).index(level)
    return False


def base_python() -> str:
    """The newest Python that can make a virtual environment, ``$PYTHON`` before all."""
    check = "import sys, ensurepip, venv; assert sys.version_info >= (3, 11)"
    started_with = os.path.realpath(sys.executable)  # follows a virtual environment to the Python it was made with
    names = [os.environ.get("PYTHON", ""), "python3.13", "python3.12", "python3.11", "python3", started_with]
    for path in filter(None, map(shutil.which, names)):
        inside = Path(path).is_relative_to(VENV)
        if not inside and subprocess.run([path, "-c", check], capture_output=True).returncode == 0:
            return path
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    raise SetupError(
        f"{started_with} cannot make a virtual environment because its module venv or ensurepip is missing; "
        f"install the package that holds it (on Debian and Ubuntu: apt install python{version}-venv)."
    )


def check_disk() -> None:
    """Check the free disk space before anything is downloaded."""
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < FREE_GB_NEEDED:
        raise SetupError(
            f"{ROOT} has {free:.1f} GB of free disk space and the set-up needs {FREE_GB_NEEDED:.1f} GB "
            "(torch for the CPU takes 1.5 GB, a CUDA build about 8 GB): free some, or move the checkout."
        )


def make_venv(level: str) -> None:
    """Create or update .venv for ``level``, leaving the stamp ``unfinished`` until all of it is there."""
    start = time.monotonic()
    if not (VENV.exists() and _venv_can_be_updated()):
        check_disk()
        base = base_python()
        shutil.rmtree(VENV, ignore_errors=True)
        VENV.mkdir()
        STAMP.write_text(UNFINISHED)
        _phase(f"making {VENV} with {base}", [base, "-m", "venv", str(VENV)])
    STAMP.write_text(UNFINISHED)
    pip = [str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check"]
    install = [*pip, "install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt")]
    names = requirements(level, everything=True)
    torch = next(name for name in names if name.startswith("torch"))
    names.remove(torch)
    pinned = _pinned(torch)
    # torch is installed first and alone: it is the largest, and packages that need it must not choose its version.
    _phase(f"installing {pinned} (a large download)", [*install, pinned])
    _phase(f"installing {len(names)} other packages", [*install, *names])
    _phase("installing gptpar", [*pip, "install", "-q", "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    _phase("compiling their Python files", [str(VENV_PYTHON), "-c", COMPILE])
    STAMP.write_text(f"{fingerprint()} {level}\n")
    say(f"{VENV} is ready ({time.monotonic() - start:.0f} s)")


def _pinned(requirement: str) -> str:
    """The line of constraints.txt for a requirement: ``torch>=2.11`` -> ``torch==2.13.0``"""
    name = requirement.partition(">=")[0]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next((line for line in lines if line.startswith(f"{name}==")), requirement)


def _venv_can_be_updated() -> bool:
    with suppress(OSError):
        if STAMP.read_text() == UNFINISHED:
            say(f"{VENV} was left unfinished: making it anew")
            return False
    check = "import sys, pip; assert sys.version_info >= (3, 11)"
    with suppress(OSError):
        if subprocess.run([str(VENV_PYTHON), "-c", check], capture_output=True).returncode == 0:
            return True
    if STAMP.exists():
        return False
    raise SetupError(f"{VENV} was not made by this script and has no Python 3.11 or newer with pip; move it away.")


def _phase(title: str, command: list[str]) -> None:
    """Run ``command`` with its output in LOG; every half minute a line says that it still runs."""
    start = time.monotonic()
    say(f"{title} ...")
    with open(LOG, "a+") as log:
        offset = log.tell()
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT)
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=30)
                    break
                say(f"  still at it ({time.monotonic() - start:.0f} s)")
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
        if process.returncode:
            log.seek(offset)
            raise SetupError(_reason(title, log.read()))
    say(f"  done ({time.monotonic() - start:.0f} s)")


def _reason(title: str, output: str) -> str:
    """One sentence about the failure, from the output of pip or venv."""
    if "No space left on device" in output:
        free = shutil.disk_usage(ROOT).free / 1e9
        return f"{title} failed because the disk is full ({free:.1f} of {FREE_GB_NEEDED:.1f} GB needed)."
    if re.search("connection broken|name resolution|from versions:|ResolutionImpossible", output):
        return (
            f"{title} failed because pip cannot reach a package index, or finds no version there that "
            "constraints.txt pins; go online, point pip at a mirror, or set PYTHON to an interpreter that has "
            f"the dependencies of pyproject.toml already (details: {LOG})."
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return f"{title} failed: {errors[-1].removesuffix('.')} (details: {LOG})."


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Lock .venv: two set-ups of one checkout, as on two nodes with a shared disk, must not write it together."""
    handle = os.open(ROOT, os.O_RDONLY)
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    try:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SetupError(f"another set-up of {ROOT} has been running for {LOCK_TIMEOUT_S} s.") from None
                time.sleep(0.5)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(handle)


def find_or_make(level: str) -> str:
    """The interpreter to use; see the module's docstring for the order."""
    asked = os.environ.get("PYTHON")
    if asked and (found := complete_interpreter(asked, level)):
        return found
    if venv_is_complete(level):
        return str(VENV_PYTHON)
    candidates = [] if STAMP.exists() else [str(VENV_PYTHON)]  # a .venv that its user filled
    candidates += [] if asked else ["python3"] if shutil.which("python3") else ["python"]
    for command in candidates:
        if found := complete_interpreter(command, level):
            return found
    with one_at_a_time():
        if not venv_is_complete(level):
            make_venv(level)
    if not any(map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))):
        say("no C++ compiler found (usual package: g++ or gcc-c++); slower Python code stands in for it.")
    return str(VENV_PYTHON)


def main(argv: list[str]) -> int:
    """``setup_env.py LEVEL`` prints the interpreter; with ``--probe`` this interpreter and what it lacks."""
    level = argv[0] if argv else ""
    if level not in LEVELS:  # before anything is written
        say(f"setup_env.py takes one of {', '.join(LEVELS)}, not {level!r}.")
        return 2
    if "--probe" in argv:
        print(sys.executable, *missing(level), sep="\n")
        return 0
    try:
        print(find_or_make(level))
    except SetupError as error:
        say(str(error))
        return 1
    except OSError as error:
        say(f"cannot set up {VENV}: {error}.")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next start makes what is missing.")
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
