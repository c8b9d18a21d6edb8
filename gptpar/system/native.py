"""Compiles the C++ helpers of ``csrc/`` once (flags, cache), and loads them through ctypes.

A helper is one ``csrc/<name>.cpp`` with a plain C ABI: it includes no Python or torch header, so any C++17
compiler builds it in about a second and the result serves every Python version. Kernels choose their
instruction set at run time: nothing here asks for ``-march=native``, and a cache on a shared home is safe.

A wheel contains its compiled helpers in ``gptpar/_lib``. Editable installs, plain checkouts and wheels on a system with
an older C library build on first use into ``$XDG_CACHE_HOME/gptpar/native`` (default ``~/.cache``).

A library's name ends with the SHA-256 of its bytes, which is checked before it is loaded. A library that a full disk or
a power cut left incomplete would end the process with a signal; it is built again instead.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import grp
import hashlib
import os
import platform
import pwd
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from gptpar.errors import NativeBuildError

FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off")
PACKAGE_DIR = Path(__file__).resolve().parents[1]
PREBUILT_DIR = PACKAGE_DIR / "_lib"
INSTALLED_DIR = PACKAGE_DIR / "_csrc"  # a wheel's copy of the sources
COMPILE_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 120.0
_LOADING = threading.Lock()


@functools.cache
def load(name: str, folder: Path | None = None) -> ctypes.CDLL:
    """The helper ``<folder>/<name>.cpp`` as a loaded library, the same for every caller in a process.

    Args:
        name: the source's file name without ``.cpp``.
        folder: where the source lies; default: an installed wheel's own copy, else the checkout's ``csrc``.

    Raises:
        NativeBuildError: no such source, no compiler, or one that refuses the source (with its own message).
    """
    source = _find_source(name, folder or source_dir())
    prebuilt = find_library(PREBUILT_DIR, library_key(source))
    if prebuilt is not None:
        with contextlib.suppress(OSError):  # made for a newer C library: build one that fits
            return ctypes.CDLL(str(prebuilt))
    compiler = find_compiler()
    library = _build_once(compiler, source, cache_dir(), library_key(source, _identity(compiler)))
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeBuildError(
            f"the helper {name} was built but cannot be loaded: {error}. If {library.parent} lies on a "
            "file system mounted noexec, set XDG_CACHE_HOME to a directory elsewhere."
        ) from error


def load_or_warn(name: str, without: str) -> ctypes.CDLL | None:
    """The helper as a library, or ``None`` after a warning if it cannot be built or loaded.

    Args:
        name: see :func:`load`.
        without: what happens without it: the beginning of the warning.
    """
    try:
        return load(name)
    except NativeBuildError as error:
        warnings.warn(f"{without}: {error}", stacklevel=3)
        return None


def load_if_possible(name: str) -> ctypes.CDLL | None:
    """The helper as a library, or ``None`` if it cannot be had: for helpers whose absence costs little time.

    Several threads may ask at once; one of them loads it.
    """
    with _LOADING, contextlib.suppress(NativeBuildError):
        return load(name)
    return None


def source_dir() -> Path:
    """The folder of our own sources: an installed wheel's, else the checkout's.

    A folder beside an installed package is not ours: ``site-packages/csrc`` belongs to some other package.
    """
    is_checkout = (PACKAGE_DIR.parent / "pyproject.toml").is_file()
    return PACKAGE_DIR.parent / "csrc" if is_checkout and not INSTALLED_DIR.is_dir() else INSTALLED_DIR


def library_key(source: Path, *builder: str) -> str:
    """``<name>-<key>``; the key covers the source, headers beside it and ours, flags, machine and ``builder``.

    A library that was built with an older header must not be found. The loader shares the objects of inline functions
    between libraries, so that one library would read objects with the other's layout.
    """
    headers = {file.name: file for folder in (source_dir(), source.parent) for file in folder.glob("*.h")}
    digest = hashlib.sha256()
    for file in [source, *(headers[name] for name in sorted(headers))]:
        digest.update(file.read_bytes())
    for part in [*FLAGS, sys.platform, platform.machine(), *builder]:
        digest.update(b"\0" + part.encode())
    return f"{source.stem}-{digest.hexdigest()[:20]}"


def find_library(folder: Path, key: str, *, owner: int | None = None) -> Path | None:
    """The library ``<key>.<SHA-256 of the file>.so`` in a folder, if it is complete; else ``None``.

    Args:
        owner: the user that the file must belong to.
    """
    for library in sorted(folder.glob(f"{key}.*.so")):
        with contextlib.suppress(OSError), open(library, "rb") as file:
            is_ours = owner is None or os.fstat(file.fileno()).st_uid == owner
            if is_ours and library.name == _library_name(key, file.read()):
                return library
    return None


def _library_name(key: str, content: bytes) -> str:
    return f"{key}.{hashlib.sha256(content).hexdigest()}.so"


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


def compile_library(compiler: list[str], source: Path, folder: Path, key: str) -> Path:
    """Compile ``source`` to a shared library that :func:`find_library` finds in ``folder`` by ``key``; return its path.

    Raises:
        NativeBuildError: with the command and the compiler's message.
    """
    command = [*compiler, *FLAGS, str(source), "-o"]
    try:
        with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as building:
            output = os.path.join(building, f"{key}.so")
            command.append(output)
            done = _run(command, COMPILE_TIMEOUT_S)
            if done.returncode:
                raise NativeBuildError(
                    f"compiling {source.name} failed (exit {done.returncode}).\n"
                    f"  command: {shlex.join(command)}\n{(done.stderr or done.stdout).strip()}"
                )
            with open(output, "rb") as file:
                target = folder / _library_name(key, file.read())
                os.fsync(file.fileno())
            os.replace(output, target)
            return target
    except subprocess.TimeoutExpired as error:
        raise NativeBuildError(
            f"compiling {source.name} took longer than {COMPILE_TIMEOUT_S:.0f} s, so it was stopped; is "
            f"the machine out of memory, or the disk under {folder} hung?\n"
            f"  command: {shlex.join(command)}"
        ) from error
    except OSError as error:
        raise NativeBuildError(f"cannot build {source.name} with {shlex.join(command)}: {error}") from error


def cache_dir() -> Path:
    """A directory that only this user can write or replace, because its contents are loaded as code.

    If there can be no such directory below ``$XDG_CACHE_HOME``, because it cannot be written or other users can write
    it, this is a temporary directory that is removed when the process ends.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = Path(root) / "gptpar" / "native"
    try:
        path.parent.mkdir(0o755, parents=True, exist_ok=True)
        path.mkdir(0o700, exist_ok=True)
        path = path.resolve()  # links are followed once, before the check, and not again after it
        path.chmod(0o700)  # fails where the directory is another user's
        mine = path.stat().st_uid == os.getuid() and os.access(path, os.W_OK | os.X_OK)
        if mine and not any(map(others_can_exchange, path.parents)):
            return path
    except OSError:
        pass
    return _private_dir()


def others_can_exchange(folder: Path) -> bool:
    """Whether a user other than this one and root can rename entries of ``folder``.

    The owner of ``/`` counts as root: in a container's user namespace it may have another number.
    """
    found = folder.stat()
    if found.st_uid not in (0, os.getuid(), os.stat("/").st_uid):
        return True
    if found.st_mode & stat.S_ISVTX:  # as in /tmp: only an entry's owner can rename it
        return False
    by_group = found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid)
    return bool(found.st_mode & stat.S_IWOTH or by_group)


def _is_private_group(gid: int) -> bool:
    """Whether it is this user's private group: many systems give every user a group of the user's name."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


@functools.cache
def _private_dir() -> Path:
    path = tempfile.mkdtemp(prefix="gptpar-native-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def _find_source(name: str, folder: Path) -> Path:
    source = folder / f"{name}.cpp"
    if not source.is_file():
        raise NativeBuildError(
            f"there is no helper {name!r}: {source} does not exist. Reinstall gptpar, or check out csrc/ as well."
        )
    return source


def _run(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s)


def _identity(compiler: list[str]) -> str:
    """The compiler's version and the C library that it links to: a library depends on them besides its source."""
    try:
        version = _run([*compiler, "--version"], timeout_s=30).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"cannot run the C++ compiler {shlex.join(compiler)}: {error}") from error
    return "\n".join([shlex.join(compiler), version, *platform.libc_ver()])


def _build_once(compiler: list[str], source: Path, folder: Path, key: str) -> Path:
    """The library in ``folder``; if many ranks start together, one compiles it and the others wait."""
    found = find_library(folder, key, owner=os.getuid())
    if found is not None:
        return found
    with _lock(folder):
        return find_library(folder, key, owner=os.getuid()) or compile_library(compiler, source, folder, key)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold ``folder``'s lock, or go on without it after LOCK_TIMEOUT_S.

    The lock only saves work: two builds at once are harmless because each publishes with an atomic rename. So a file
    system without locks, or a holder that hangs, must not stop a process.
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
