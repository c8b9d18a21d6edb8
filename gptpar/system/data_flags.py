"""Flags of corpora and tokenizers, which several commands read alike. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from gptpar.system.files import facts_in

_TOKENIZERS = facts_in("tokenizers.toml", __file__)
TOKENIZERS: dict[str, str] = _TOKENIZERS["types"]
TOKENIZER_TYPES = tuple(TOKENIZERS)
TOKENIZER_FILES: dict[str, str] = _TOKENIZERS["files"]
TIKTOKEN: dict[str, str] = _TOKENIZERS["tiktoken"]


def split_weights(entries: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights) of a ``--data-path`` list; weights are ``None`` if the list has none.

    An even number of entries whose first, third, ... are numbers is a list of WEIGHT PREFIX pairs; anything else is a
    list of prefixes.
    """
    if len(entries) % 2:
        return list(entries), None
    try:
        weights = [float(entry) for entry in entries[::2]]
    except ValueError:
        return list(entries), None
    return list(entries[1::2]), weights
