"""``deepspeed.ops.op_builder``: which of DeepSpeed's operators gptpar has; it builds none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from gptpar.errors import GptparError

_OPERATORS = {
    "AsyncIOBuilder": ("async_io", False),
    "CPUAdagradBuilder": ("cpu_adagrad", False),
    "CPUAdamBuilder": ("cpu_adam", True),
    "CPULionBuilder": ("cpu_lion", False),
    "FusedAdamBuilder": ("fused_adam", True),
    "FusedLambBuilder": ("fused_lamb", False),
    "FusedLionBuilder": ("fused_lion", False),
}

__compatible_ops__ = dict(_OPERATORS.values())
"""``deepspeed.ops.__compatible_ops__``: an operator's name -> whether it is here."""


class _Builder:
    NAME: ClassVar[str]

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operator is here."""
        return __compatible_ops__[self.NAME]

    def load(self, verbose: bool = True) -> NoReturn:
        """Refuse: programs use operators through optimizers.

        Raises:
            GptparError: always.
        """
        raise GptparError(f"DeepSpeed's operator {self.NAME} is not built by gptpar: use deepspeed.ops.adam.")


def __getattr__(name: str) -> Callable[[], Any]:
    if name not in _OPERATORS:
        raise AttributeError(f"deepspeed.ops.op_builder has no {name!r} in gptpar")
    return type(name, (_Builder,), {"NAME": _OPERATORS[name][0]})
