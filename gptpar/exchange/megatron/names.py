"""Maps Megatron's names of weights to ours: older layers, Megatron Core's and its fused layers."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from gptpar.errors import CheckpointError, printable
from gptpar.system.files import facts_in

FACTS: dict[str, Any] = facts_in("megatron.toml", __file__)
"""Megatron's arguments and names, from ``megatron.toml``."""

EVERY_LAYER = "layers.*."
"""The prefix of a parameter whose layers are all stored as one tensor."""

_PREFIX = re.compile(r"(module|model|language_model|embedding|encoder|decoder|transformer|tied_modules\.embed)\.")
_PLACE = re.compile(r"(\d{1,9})\.(.+)")
_LAYER = re.compile(r"layers\.(?:(\d+)\.)?(.+)")


def our_name(theirs: str, counted: int = 0) -> str:
    """Our global name of one of Megatron's parameters.

    The name begins with :data:`EVERY_LAYER` if one tensor has all layers.

    Args:
        theirs: Megatron's name.
        counted: number of blocks in earlier stages. Each stage numbers its own blocks from 0.

    Raises:
        CheckpointError: no parameter of ours corresponds to it.
    """
    name = theirs
    while found := _PREFIX.match(name):
        name = name[found.end() :]
    layer = _LAYER.fullmatch(name)
    table, inner = (FACTS["weights_in_block"], layer[2]) if layer else (FACTS["weights"], name)
    known = next((one for one in table if _begins(inner, one)), None)
    if known is None:
        raise CheckpointError(f"tensor {printable(theirs[:80])!r} has no place in a model as gptpar knows it")
    prefix = ""
    if layer:
        prefix = EVERY_LAYER if layer[1] is None else f"layers.{int(layer[1]) + counted}."
    return f"{prefix}{table[known]}{inner.removeprefix(known)}"


def names_in_model(names: Collection[str]) -> dict[str, str]:
    """Each parameter's name in DeepSpeed's pipeline module -> its name in a model.

    A name in a pipeline begins with a number, the place of its layer. Places with an attention are the blocks, in
    order. A place with ``weight`` or ``bias`` alone is the final norm. Names without a place stay as they are.
    """
    placed = {name: (int(found[1]), found[2]) for name in names if (found := _PLACE.fullmatch(name))}
    blocks = sorted({place for place, inner in placed.values() if inner.startswith(("self_attention.", "attention."))})
    numbers = {place: number for number, place in enumerate(blocks)}
    in_model = {name: _in_model(inner, numbers.get(place)) for name, (place, inner) in placed.items()}
    return {name: in_model.get(name, name) for name in names}


def _in_model(inner: str, block: int | None) -> str:
    if block is not None:
        return f"layers.{block}.{inner}"
    return f"final_norm.{inner}" if inner in ("weight", "bias") else inner


def _begins(name: str, table_name: str) -> bool:
    return name == table_name or name.startswith(table_name if table_name.endswith("_") else f"{table_name}.")
