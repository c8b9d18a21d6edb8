"""What is said of flags that do not go together."""

from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError

GOOD = "--preset 124M --micro-batch-size 2 --train-iters 10 --lr 3e-4 --mock-data --vocab-size 50257"


def problems(flags: str, world_size: int = 1) -> list[str]:
    try:
        resolve(parse_flags(f"{GOOD} {flags}".split()), world_size)
    except ConfigError as error:
        return error.problems
    return []
