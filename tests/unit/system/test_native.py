"""The C++ helpers: built once, atomically, for this user alone, and every failure says what to do."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gptpar.system import native

ROOT = Path(__file__).resolve().parents[3]
SOURCE = 'extern "C" long long add(long long a, long long b) { return a + b; }\n'

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on this machine"
)


@pytest.fixture
def csrc(tmp_path, monkeypatch):
    """A source directory with one helper, ``tiny``, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(SOURCE)
    yield folder
    native.load.cache_clear()


def libraries(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "gptpar" / "native").glob("*.so"))


@needs_compiler
def test_builds_once_into_a_private_cache(csrc, tmp_path):
    library = native.load("tiny", csrc)
    assert library.add(40, 2) == 42
    assert native.load("tiny", csrc) is library
    (built,) = libraries(tmp_path)
    assert built.parent.stat().st_mode & 0o777 == 0o700
    assert [p.name for p in built.parent.iterdir()] == [built.name]  # no temporary file, no lock file

    stamp = built.stat().st_mtime_ns
    native.load.cache_clear()
    assert native.load("tiny", csrc).add(1, 1) == 2
    assert built.stat().st_mtime_ns == stamp


@needs_compiler
@pytest.mark.parametrize("changed", ["tiny.cpp", pytest.param("shared.h", marks=pytest.mark.slow)])
def test_a_changed_source_or_header_is_built_anew(csrc, tmp_path, changed):
    native.load("tiny", csrc)
    native.load.cache_clear()
    (csrc / changed).write_text(SOURCE.replace("a + b", "a - b"))
    expected = {"tiny.cpp": 1, "shared.h": 5}[changed]
    assert native.load("tiny", csrc).add(3, 2) == expected
    assert len(libraries(tmp_path)) == 2


def built_before(csrc: Path) -> Path:
    """The cached library of ``tiny``, as an earlier process has left it: nothing of it is mapped here."""
    compiler = native.find_compiler()
    key = native.library_key(csrc / "tiny.cpp", native._identity(compiler))
    return native.compile_library(compiler, csrc / "tiny.cpp", native.cache_dir(), key)


@needs_compiler
@pytest.mark.parametrize("damage", ["a half", pytest.param("zeroed half", marks=pytest.mark.slow)])
def test_a_damaged_library_is_never_loaded_but_made_again(csrc, damage):
    """The loader maps what the file's header promises: such files end a process with SIGBUS or SIGSEGV."""
    library = built_before(csrc)
    whole = library.read_bytes()
    half = len(whole) // 2
    library.write_bytes(whole[:half] + bytes(len(whole) - half) if damage == "zeroed half" else whole[:half])
    assert native.find_library(library.parent, library.name.split(".")[0]) is None
    assert native.load("tiny", csrc).add(2, 2) == 4
    assert library.read_bytes() == whole


@pytest.mark.parametrize(
    ("mode", "owner", "shared"), [(0o755, 0, False), (0o775, 0, True), (0o1777, 0, False), (0o755, 12345, True)]
)
def test_a_cache_thatothers_can_exchange_is_not_used(csrc, tmp_path, monkeypatch, mode, owner, shared):
    """A parent folder that others can write, or another user's, lets them put another folder in the cache's place."""
    if owner and os.getuid():
        pytest.skip("only root can give a folder away")
    between = tmp_path / "between"
    between.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(between / "cache"))
    monkeypatch.setattr(native, "_is_private_group", lambda gid: False)
    native.cache_dir()
    if owner:
        os.chown(between, owner, owner)
    between.chmod(mode)
    folder = native.cache_dir()
    assert (folder == between / "cache" / "gptpar" / "native") is not shared
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@needs_compiler
def test_eight_processes_compile_once(csrc, tmp_path):
    log = tmp_path / "compiler.log"
    wrapper = tmp_path / "cxx"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo run >> {log} ;; esac\nexec {native.find_compiler()[0]} "$@"\n'
    )
    wrapper.chmod(0o755)
    program = (
        "import sys, types, pathlib\n"
        "package = sys.modules['gptpar'] = types.ModuleType('gptpar')\n"  # without gptpar/__init__: it imports torch
        "package.__path__ = [sys.argv[2]]\n"
        "from gptpar.system import native\n"
        "print(native.load('tiny', pathlib.Path(sys.argv[1])).add(20, 1))"
    )
    environment = {**os.environ, "CXX": str(wrapper), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, csrc, ROOT / "gptpar"]
    ranks = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    assert [rank.communicate(timeout=300)[0].strip() for rank in ranks] == ["21"] * 8
    assert log.read_text() == "run\n"


def run(command: list[object], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@needs_compiler
@pytest.mark.parametrize("compiler", ["", "/nonexistent/c++"], ids=["compiler", "no compiler"])
@pytest.mark.slow
def test_a_wheel_carries_the_helpers(tmp_path, csrc, monkeypatch, compiler):
    """Built in a copy, unpacked elsewhere and loaded from another directory; sources alone if no compiler."""
    pytest.importorskip("setuptools", minversion="77")
    copy = tmp_path / "copy"
    (copy / "gptpar" / "system").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("errors.py", "system/__init__.py", "system/native.py"):
        shutil.copy(ROOT / "gptpar" / name, copy / "gptpar" / name)
    (copy / "gptpar" / "__init__.py").write_text("")
    (copy / "README.md").write_text("")
    shutil.copytree(csrc, copy / "csrc")
    environment = {**os.environ, **({"CXX": compiler} if compiler else {})}
    build = "from setuptools.build_meta import build_wheel; import sys; build_wheel(sys.argv[1])"
    done = run([sys.executable, "-c", build, tmp_path], copy, environment)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith("gptpar-") and "-py3-none-" in wheel.name and "-any" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    prebuilt = list((tmp_path / "site" / "gptpar" / "_lib").glob("tiny-*.so"))
    assert len(prebuilt) == (0 if compiler else 1)
    if compiler:
        assert "is left to be built on first use: no C++ compiler found" in done.stderr + done.stdout
    program = "from gptpar.system import native; print(native.load('tiny').add(6, 7))"
    printed = run([sys.executable, "-c", program], tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert printed.stdout.strip() == "13", printed.stderr
    assert len(libraries(tmp_path)) == (1 if compiler else 0)
