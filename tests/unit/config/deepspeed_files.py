"""DeepSpeed's JSON beside flags: what they say together, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptpar.config import Config
from gptpar.config.fields import Derived
from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import ConfigError

MODEL = "--preset 124M --train-iters 5000 --mock-data --vocab-size 50257 --eval-iters 0"
BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
RATE = {"optimizer": {"type": "AdamW", "params": {"lr": 6e-4}}}


def parsed_with(file: dict[str, Any] | str, flags: str = "") -> ParsedFlags:
    Path("ds.json").write_text(file if isinstance(file, str) else json.dumps(file))
    return parse_flags(f"{MODEL} --deepspeed --deepspeed_config ds.json {flags}".split())


def resolved(file: dict[str, Any] | str, flags: str = "", world: int = 4) -> tuple[Config, dict[str, Derived]]:
    config, derived = resolve(parsed_with(file, flags), world)
    return config, {d.name: d for d in derived}


def problems(file: dict[str, Any] | str, flags: str = "", world: int = 4) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(parsed_with(file, flags), world)
    return caught.value.problems
