"""The compiled update, and a machine without a compiler."""

import pytest

from gptpar.errors import NativeBuildError
from gptpar.optim import cpu_adam
from gptpar.system import native


@pytest.fixture(scope="module")
def library():
    found = cpu_adam._library()
    if found is None:
        pytest.skip("no C++ compiler on this machine")
    return found


@pytest.fixture(scope="module")
def isas(library) -> list[int]:
    return [isa for isa in (0, 1, 2) if library.lasting.cpu_adam_isa(isa)]


@pytest.fixture
def no_compiler(monkeypatch):
    """Every CpuAdam made under it finds no compiled kernel."""

    def refuse(name):
        raise NativeBuildError("compiling cpu_adam.cpp failed: no room for the dragon")

    monkeypatch.setattr(native, "load", refuse)
    cpu_adam._library.cache_clear()
    yield
    cpu_adam._library.cache_clear()
