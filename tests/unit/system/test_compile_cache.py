"""Code that another user could have written is not loaded from torch's cache."""

import tempfile
from pathlib import Path

import pytest

from gptpar.errors import GptparError
from gptpar.system.compile_cache import VARIABLE, refuse_others_compile_cache


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refuse_others_compile_cache()  # there is none yet
    folder = Path(default_cache_dir())
    assert folder.parent == tmp_path
    folder.mkdir(mode=0o755)
    refuse_others_compile_cache()
    folder.chmod(0o777)
    with pytest.raises(GptparError, match=f"{VARIABLE} to a folder that only you can write"):
        refuse_others_compile_cache()
    monkeypatch.setenv(VARIABLE, str(folder))  # the user's own choice
    refuse_others_compile_cache()
