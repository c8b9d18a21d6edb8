"""Reads Megatron-LM's ways to say which layers are different: every N-th one, or a list of 0 and 1."""

from __future__ import annotations

import ast

LAYER_LISTS = (("no_rope_freq", "rope_pattern", "RN", 0), ("window_attn_skip_freq", "window_pattern", "FS", 1))
"""Megatron-LM's field, ours, and the arguments of :func:`layer_pattern` that make ours of it."""

MAX_LAYERS = 10_000
MAX_CHARACTERS = 100_000


def layer_pattern(text: str, letters: str, most: int) -> str:
    """A letter a layer, to be repeated over the layers.

    Args:
        text: N, or a list such as ``([0]*3+[1])*8``.
        letters: the letters for the digits 0 and 1.
        most: the digit of every layer but each N-th one.

    Raises:
        ValueError: why the text means nothing, as a part of a sentence.
    """
    digits = layer_digits(text)
    if isinstance(digits, int):
        return letters[most] * (digits - 1) + letters[1 - most]
    return "".join(letters[digit] for digit in digits)


def layer_digits(text: str) -> list[int] | int:
    """N, or a digit a layer.

    Raises:
        ValueError: why the text means nothing, as a part of a sentence.
    """
    number = text.strip()
    if number.isdecimal() and 1 <= (every := int(number.lstrip("0")[:10] or 0)) <= MAX_LAYERS:
        return every
    try:
        digits = _digits(ast.parse(text[:MAX_CHARACTERS].strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        digits = None
    if not isinstance(digits, list) or not digits:
        raise ValueError(f"a number from 1 to {MAX_LAYERS:,}, or a list of 0 and 1 such as [0]*3+[1], is needed")
    return digits


def _digits(node: ast.expr) -> list[int] | int | None:
    """A list of digits, a number of repetitions, or ``None`` if it is neither."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool) and 0 <= value <= MAX_LAYERS:
            return value
        case ast.List(elts=elements):
            found = [_digits(one) for one in elements]
            if not all(one in (0, 1) for one in found):
                return None
            return [int(one == 1) for one in found]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _digits(left), _digits(right)
            if isinstance(first, list) and isinstance(second, list) and len(first) + len(second) <= MAX_LAYERS:
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _repeated(_digits(left), _digits(right))
    return None


def _repeated(first: list[int] | int | None, second: list[int] | int | None) -> list[int] | None:
    """A list as often as a number says; they may stand in either order."""
    if isinstance(first, int):
        first, second = second, first
    if isinstance(first, list) and isinstance(second, int) and len(first) * second <= MAX_LAYERS:
        return first * second
    return None
