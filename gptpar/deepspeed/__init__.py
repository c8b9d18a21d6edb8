"""DeepSpeed's names over ``gptpar.initialize``: ``import gptpar.deepspeed as deepspeed`` is a program's whole change.

Each name is where DeepSpeed 0.19 has it (``deepspeed.zero.Init``, ``deepspeed.ops.adam.DeepSpeedCPUAdam``), and either
has DeepSpeed's meaning or raises an error that names the way out. :mod:`gptpar.deepspeed.names` lists all of them.
Programs and libraries that import ``deepspeed`` themselves run under ``gptpar as-deepspeed``.
"""

from __future__ import annotations

from typing import Any

from gptpar.deepspeed.places import found, serve

serve(__name__)


def __getattr__(name: str) -> Any:
    return found(__name__, "", name)
