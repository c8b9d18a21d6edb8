"""Reads the files that hold the words of ``--data-path``, as Megatron-LM does. Pure but for reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPLITS = ("train", "valid", "test")


def read_data_args(path: str) -> tuple[str, ...]:
    """The words of ``--data-args-path``: prefixes, or WEIGHT PREFIX pairs, over any number of lines.

    Raises:
        ValueError: there are none, as a part of a sentence.
    """
    words = tuple(_text(path).split())
    if not words:
        raise ValueError("it is empty: prefixes of data sets are needed")
    return words


def read_split_data_args(path: str) -> dict[str, tuple[str, ...]]:
    """The words of ``--per-split-data-args-path`` by field: a JSON object of lists, or of texts of words.

    Raises:
        ValueError: it is none, as a part of a sentence.
    """
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    if not isinstance(value, dict) or not {*SPLITS} >= value.keys() or "train" not in value:
        raise ValueError(f"a JSON object with {', '.join(SPLITS)} is needed")
    return {f"{split}_data_path": words for split in SPLITS if (words := _words(value.get(split), split))}


def _words(value: Any, split: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(value.split())
    if value is None or isinstance(value, list):
        return tuple(map(str, value or ()))
    raise ValueError(f"{split} must be a list of words, or a text of them")


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise ValueError("it is no text") from None
