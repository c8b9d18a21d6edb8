"""The roles of a GPT's layers (embedding, block, LM head, ...), and their order."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """The role of a layer; whoever needs a certain layer asks for its role, not for its position."""

    EMBEDDING = "embedding"
    POSITIONS = "positions"
    BLOCK = "block"
    FINAL_NORM = "final norm"
    LM_HEAD = "LM head"


def layer_roles(num_blocks: int) -> tuple[Role, ...]:
    """The role of every layer, in the order of the forward pass."""
    return (Role.EMBEDDING, Role.POSITIONS, *[Role.BLOCK] * num_blocks, Role.FINAL_NORM, Role.LM_HEAD)
