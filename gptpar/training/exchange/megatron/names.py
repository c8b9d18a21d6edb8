"""Megatron's names of weights: of Megatron-LM's older layers, of Megatron Core's and of its fused ones."""

from __future__ import annotations

import re
from collections.abc import Collection

from gptpar.errors import CheckpointError, printable

OURS = {
    "word_embeddings.weight": "embedding.weight",
    "position_embeddings.weight": "positions.weight",
    "final_layernorm": "final_norm",
    "final_norm": "final_norm",
    "output_layer.weight": "output.weight",
    "lm_head.weight": "output.weight",
}
"""Names around the blocks; a name without ``weight`` stands for all of its parameters."""

OURS_IN_BLOCK = {
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "self_attention.linear_qkv.layer_norm_": "attention_norm.",
    "self_attention.query_key_value": "attention.qkv",
    "attention.query_key_value": "attention.qkv",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.dense": "attention.out",
    "attention.dense": "attention.out",
    "self_attention.linear_proj": "attention.out",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm_": "mlp_norm.",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.linear_fc1": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "mlp.linear_fc2": "mlp.down",
}
"""Names within a block; the first fits."""

EVERY_LAYER = "layers.*."
"""Begins the name of a parameter of all layers, which are stored as one tensor."""

_PREFIX = re.compile(r"(module|model|language_model|embedding|encoder|decoder|transformer|tied_modules\.embed)\.")
_PLACE = re.compile(r"(\d{1,9})\.(.+)")
_LAYER = re.compile(r"layers\.(?:(\d+)\.)?(.+)")


def our_name(theirs: str, counted: int = 0) -> str:
    """Our global name of a parameter of theirs, or one that begins with :data:`EVERY_LAYER`.

    Args:
        counted: blocks in the stages before this one, which number theirs from 0.

    Raises:
        CheckpointError: none of our parameters is the same.
    """
    name = theirs
    while found := _PREFIX.match(name):
        name = name[found.end() :]
    layer = _LAYER.fullmatch(name)
    table, inner = (OURS_IN_BLOCK, layer[2]) if layer else (OURS, name)
    known = next((one for one in table if _begins(inner, one)), None)
    if known is None:
        raise CheckpointError(f"tensor {printable(theirs[:80])!r} has no place in a model as gptpar knows it")
    prefix = ""
    if layer:
        prefix = EVERY_LAYER if layer[1] is None else f"layers.{int(layer[1]) + counted}."
    return f"{prefix}{table[known]}{inner.removeprefix(known)}"


def names_in_model(names: Collection[str]) -> dict[str, str]:
    """Names of parameters in a pipeline, which begin with a place among all layers -> as they are in a model.

    Blocks are the places that have an attention, in order. A place with ``weight`` or ``bias`` alone is the last norm.
    Other names stay as they are.
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
