"""A folder for files whose names are part of a sentence."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are named relative to it, so that sentences do not depend on where it is."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
