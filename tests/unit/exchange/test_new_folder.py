"""A new folder appears whole or not at all, and an error names what it is about."""

from pathlib import Path

import pytest

from gptpar.errors import CheckpointError
from gptpar.exchange.files.new_folder import new_folder


def test_an_error_names_the_file_that_could_not_be_read(tmp_path: Path) -> None:
    source, target = tmp_path / "lost", tmp_path / "new"
    with pytest.raises(CheckpointError) as error, new_folder(target):
        source.read_bytes()
    assert str(error.value) == f"{target} cannot be written: {source}: No such file or directory"
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_folder_itself_names_it_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "new", tmp_path / "file/new"):
        with pytest.raises(CheckpointError) as error, new_folder(target) as folder:
            (folder / "no/such").touch()
        inside = f"{target}/no/such: No such file or directory"
        reason = "Not a directory" if "file" in target.parts else inside
        assert str(error.value) == f"{target} cannot be written: {reason}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
