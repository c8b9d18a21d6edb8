"""Load the C++ helpers of ``csrc/`` through ctypes, compiling them once where nobody has yet.

A helper is one ``csrc/<name>.cpp`` with a plain C ABI: it includes no Python or torch header, so any C++17
compiler builds it in about a second and the result serves every Python version. Kernels choose their
instruction set at run time: nothing here asks for ``-march=native``, and a cache on a shared home is safe.

A wheel carries its helpers ready-made in ``gptpar/_lib``. Editable installs, plain checkouts and wheels that
meet an older C library build on first use into ``$XDG_CACHE_HOME/gptpar/native`` (default ``~/.cache``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from gptpar.errors import NativeBuildError

FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off")
PACKAGE_DIR = Path(__file__).resolve().parent
PREBUILT_DIR = PACKAGE_DIR / "_lib"
SOURCE_DIRS = (PACKAGE_DIR.parent / "csrc", PACKAGE_DIR / "_csrc")  # a checkout's, an installed wheel's
COMPILE_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 120.0


@functools.cache
def load(name: str, source_dir: Path | None = None) -> ctypes.CDLL:
    """The helper ``<source_dir>/<name>.cpp`` as a loaded library, the same for every caller in a process.

    Args:
        name: the source's file name without ``.cpp``.
        source_dir: where the source lies; default: the checkout's ``csrc``, else a wheel's own copy.

    Raises:
        NativeBuildError: no such source, no compiler, or one that refuses the source (with its own message).
    """
    source = _find_source(name, source_dir)
    prebuilt = PREBUILT_DIR / library_name(source)
    if prebuilt.exists():
        with contextlib.suppress(OSError):  # made for a newer C library: build one that fits
            return ctypes.CDLL(str(prebuilt))
    compiler = find_compiler()
    target = cache_dir() / library_name(source, _identity(compiler))
    _build_once(compiler, source, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError:  # cut short by a full disk, or built against another C library: make it again
        compile_library(compiler, source, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeBuildError(
            f"the helper {name} was built but cannot be loaded: {error}. If {target.parent} lies on a "
            "file system mounted noexec, set XDG_CACHE_HOME to a directory elsewhere."
        ) from error


def library_name(source: Path, *builder: str) -> str:
    """``<name>-<key>.so``; the key covers the source, headers beside it and ours, flags, machine and ``builder``.

    A library of an older header must not be found: the loader shares objects of inline functions between libraries, so
    that the one would work with what the other has laid out.
    """
    headers = {file.name: file for folder in (*SOURCE_DIRS, source.parent) for file in folder.glob("*.h")}
    digest = hashlib.sha256()
    for file in [source, *(headers[name] for name in sorted(headers))]:
        digest.update(file.read_bytes())
    for part in [*FLAGS, sys.platform, platform.machine(), *builder]:
        digest.update(b"\0" + part.encode())
    return f"{source.stem}-{digest.hexdigest()[:20]}.so"


def find_compiler() -> list[str]:
    """The C++ compiler's command: ``$CXX`` (which may hold arguments), else the first of c++, g++, clang++.

    Raises:
        NativeBuildError: there is none.
    """
    wanted = shlex.split(os.environ.get("CXX", ""))
    for command in [wanted] if wanted else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    tried = f"CXX={os.environ['CXX']}" if wanted else "c++, g++ and clang++"
    raise NativeBuildError(
        f"no C++ compiler found (tried {tried}). Install one (the package is usually g++ on Debian and "
        "Ubuntu, gcc-c++ on Fedora and RHEL, the Xcode command line tools on macOS) or point CXX at one."
    )


def compile_library(compiler: list[str], source: Path, target: Path) -> None:
    """Compile ``source`` to the shared library ``target``, which appears complete or not at all.

    Raises:
        NativeBuildError: with the command and the compiler's message.
    """
    command = [*compiler, *FLAGS, str(source), "-o"]
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as folder:
            output = os.path.join(folder, target.name)
            command.append(output)
            done = _run(command, COMPILE_TIMEOUT_S)
            if done.returncode:
                raise NativeBuildError(
                    f"compiling {source.name} failed (exit {done.returncode}).\n"
                    f"  command: {shlex.join(command)}\n{(done.stderr or done.stdout).strip()}"
                )
            os.replace(output, target)
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(
            f"compiling {source.name} took longer than {COMPILE_TIMEOUT_S:.0f} s, so it was stopped; is "
            f"the machine out of memory, or the disk under {target.parent} hung?\n"
            f"  command: {shlex.join(command)}"
        ) from error
    except OSError as error:
        raise NativeBuildError(f"cannot build {source.name} with {shlex.join(command)}: {error}") from error


def cache_dir() -> Path:
    """A directory that this user alone can write: what lies in it is loaded as code.

    Falls back to a temporary directory, removed when the process ends, where the home cannot be written.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(root) / "gptpar" / "native"
    try:
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)  # fails where the directory is another user's
        if path.stat().st_uid == os.getuid() and os.access(path, os.W_OK | os.X_OK):
            return path
    except OSError:
        pass
    return _private_dir()


@functools.cache
def _private_dir() -> Path:
    path = tempfile.mkdtemp(prefix="gptpar-native-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _find_source(name: str, source_dir: Path | None) -> Path:
    tried = [directory / f"{name}.cpp" for directory in ([source_dir] if source_dir else SOURCE_DIRS)]
    for source in tried:
        if source.is_file():
            return source
    raise NativeBuildError(
        f"there is no helper {name!r}: neither {' nor '.join(map(str, tried))} exists. Reinstall gptpar, or "
        "check out csrc/ as well."
    )


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)


def _identity(compiler: list[str]) -> str:
    """What a library depends on besides its source: the compiler's version and the C library it links to."""
    try:
        version = _run([*compiler, "--version"], timeout_s=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"cannot run the C++ compiler {shlex.join(compiler)}: {error}") from error
    return "\n".join([shlex.join(compiler), version, *platform.libc_ver()])


def _build_once(compiler: list[str], source: Path, target: Path) -> None:
    """Of many ranks that start together one compiles and the others wait for it."""
    if target.exists():
        return
    with _lock(target.parent):
        if not target.exists():
            compile_library(compiler, source, target)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold ``folder``'s lock, or go on without it after LOCK_TIMEOUT_S.

    The lock only saves work: two builds at once are harmless because each publishes with an atomic rename. So
    a file system without locks, or a holder that hangs, must not stop anyone.
    """
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    handle = os.open(folder, os.O_RDONLY)
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:
                break
        yield
    finally:
        os.close(handle)
