"""A new folder appears whole or not at all, and an error names what it is about."""

from pathlib import Path

import pytest

from gptpar.errors import CheckpointError
from gptpar.exchange.files.new_folder import new_folder


@pytest.mark.parametrize(
    ("target", "opened", "reason"),
    [
        ("new", "lost", "{}/lost: No such file or directory"),
        ("new", "new/no/such", "{}/new/no/such: No such file or directory"),
        ("file/new", "lost", "Not a directory"),
    ],
)
def test_an_error_names_the_file_once_and_nothing_is_left(
    target: str, opened: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError) as error, new_folder(tmp_path / target) as folder:
        Path(str(tmp_path / opened).replace(str(tmp_path / target), str(folder))).read_bytes()
    assert str(error.value) == f"{tmp_path / target} cannot be written: {reason.replace('{}', str(tmp_path))}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
