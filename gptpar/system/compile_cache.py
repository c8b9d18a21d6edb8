"""Guards torch's cache of compiled code: a folder of a known name under /tmp, whose contents torch runs."""

from __future__ import annotations

import os
from pathlib import Path

from gptpar.errors import GptparError
from gptpar.system.native import others_can_exchange

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def refuse_others_compile_cache() -> None:
    """Refuse torch's cache if another user could have put code there; call it before anything is compiled.

    A folder that the user has chosen is trusted.

    Raises:
        GptparError: torch's own folder belongs to another user, or others can write to it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = Path(default_cache_dir())
    if os.environ.get(VARIABLE) is None and folder.exists() and others_can_exchange(folder):
        raise GptparError(
            f"{folder}, from which torch would load compiled code, is another user's or can be written by others: "
            f"remove it, or set {VARIABLE} to a folder that only you can write."
        )
