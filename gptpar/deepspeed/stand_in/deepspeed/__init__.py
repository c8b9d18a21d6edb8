"""``import deepspeed`` under ``gptpar as-deepspeed``: the names of ``gptpar.deepspeed``."""

from __future__ import annotations

from typing import Any

from gptpar.deepspeed.places import found, serve

serve(__name__)


def __getattr__(name: str) -> Any:
    return found(__name__, "", name)
