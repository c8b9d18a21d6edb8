"""``deepspeed.ops.op_builder``: which of DeepSpeed's operators gptpar has; it builds none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from gptpar.deepspeed.names import FACTS
from gptpar.errors import GptparError

_OPERATORS: dict[str, str] = FACTS["operators"]
_HERE = ("cpu_adam", "fused_adam")

__compatible_ops__ = {name: name in _HERE for name in _OPERATORS.values()}
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
    return type(name, (_Builder,), {"NAME": _OPERATORS[name]})
