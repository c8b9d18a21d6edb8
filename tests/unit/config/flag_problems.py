"""What is said of flags that do not go together."""

from collections.abc import Sequence

from gptpar.config import Config
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError
from tests.helpers import TINY

GOOD = "--preset 124M --micro-batch-size 2 --train-iters 10 --lr 3e-4 --mock-data --vocab-size 50257"


def resolved(flags: str | Sequence[str], world_size: int = 1, start: str = TINY) -> Config:
    """The configuration of these flags behind those of a good start."""
    words = flags.split() if isinstance(flags, str) else flags
    return resolve(parse_flags([*start.split(), *words]), world_size)[0]


def problems(flags: str | Sequence[str], world_size: int = 1, start: str = TINY) -> list[str]:
    try:
        resolved(flags, world_size, start)
    except ConfigError as error:
        return error.problems
    return []
