"""Files to evaluate on, and a tiny model that reads bytes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptpar.config import Config
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve

BYTES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --train-iters 4 "
    "--lr 1e-2 --mock-data --tokenizer-type ByteLevelTokenizer --attention-dropout 0 --hidden-dropout 0 --eval-iters 0"
)
QUESTIONS = [
    {"query": "The sky is", "choices": ["blue", "a long green thing", "no"], "gold": 0},
    {"query": "Two and two are ", "choices": ["four", "five"], "gold": 0},
    {"query": "", "choices": ["yes", "no"], "gold": 1},
    {"query": "A very long query that the model cannot read whole:", "choices": ["the end", "x"], "gold": 1},
    {"query": "Gr\u00fc\u00dfe aus", "choices": ["K\u00f6ln", "Bonn am Rhein"], "gold": 1},
]
TEXTS = [{"text": "short"}, {"text": "This text is longer than the context of the model: it takes three windows."}]


def byte_config(flags: str = "", world_size: int = 1) -> Config:
    """The tiny model of bytes with further flags, resolved."""
    config, _ = resolve(parse_flags(f"{BYTES} {flags}".split()), world_size)
    return config.update("model", padded_vocab_size=320, softmax_vocab_size=257)


def write_lines(path: Path, lines: Sequence[dict[str, Any] | str]) -> str:
    """A line for each; a text as it is."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)
