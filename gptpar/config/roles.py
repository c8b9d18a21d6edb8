"""The roles of a GPT's layers (embedding, block, LM head, ...), and their order."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """What a layer is for; whoever needs to know a certain layer asks for its role, not for its position."""

    EMBEDDING = "embedding"
    POSITIONS = "positions"
    BLOCK = "block"
    FINAL_NORM = "final norm"
    LM_HEAD = "LM head"


BEFORE_BLOCKS = (Role.EMBEDDING, Role.POSITIONS)
AFTER_BLOCKS = (Role.FINAL_NORM, Role.LM_HEAD)


def layer_roles(num_blocks: int) -> tuple[Role, ...]:
    """The role of every layer, in the order of the forward pass."""
    return (*BEFORE_BLOCKS, *[Role.BLOCK] * num_blocks, *AFTER_BLOCKS)
