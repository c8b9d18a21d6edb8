"""How context-parallel processes see each other's tokens: what ``auto`` stands for, and whether it can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gptpar.config.fields import Notes

if TYPE_CHECKING:
    from gptpar.config import Flags


def derive_context(notes: Notes) -> None:
    """Choose how context-parallel processes exchange tokens, where ``--cp-comm-type`` is ``auto``."""
    p, m = notes.flags.parallel, notes.flags.model
    tensor = p.tensor_model_parallel_size
    if tensor < 1 or p.cp_comm_type != "auto" or not (m.num_attention_heads and m.num_query_groups and m.seq_length):
        return
    notes.replace("parallel", "cp_comm_type", *_way_over_context(notes.flags, m.num_attention_heads // tensor))


def _way_over_context(flags: Flags, heads: int) -> tuple[str, str]:
    """The value of ``--cp-comm-type`` that ``auto`` stands for, and the reason.

    Args:
        heads: query heads of a tensor rank.
    """
    p, m, size = flags.parallel, flags.model, flags.parallel.context_parallel_size
    if heads % size:
        return "allgather", f"{heads} heads do not divide over {size} processes"
    if m.attention_dropout and (m.num_query_groups or 0) // p.tensor_model_parallel_size % size:
        return "allgather", "dropout of attention, whose masks belong to whole query groups"
    if m.attention_dropout:
        return "a2a", "dropout of attention, which allgather computes for all tokens"
    if m.seq_length and m.seq_length % (2 * size):
        return "a2a", f"{2 * size} chunks need other lengths"
    if not flags.precision.bf16:
        return "a2a", "allgather needs a mask in memory without --bf16"
    if not flags.data.reset_attention_mask and m.window_size is None:
        return "a2a", "whole samples have a faster kernel there"
    sent = p.heads_sent(m.num_attention_heads or 0, m.num_query_groups or 0)
    said = ", ".join(f"{n:g} by {way}" for way, n in sent.items())
    return min(sent, key=sent.__getitem__), f"heads that a layer sends for a token: {said}"


def check_context(flags: Flags) -> Iterator[str]:
    """Problems of context parallelism: processes need equally many tokens of a sample, and none has whole samples."""
    m, p = flags.model, flags.parallel
    size = p.context_parallel_size
    parts = 2 * size if p.cp_comm_type == "allgather" else size
    name = f"--context-parallel-size {size} with --cp-comm-type {p.cp_comm_type}"
    if m.seq_length and m.seq_length % parts:
        near = max(parts, round(m.seq_length / parts) * parts)
        yield f"{name}: --seq-length {m.seq_length} is not divisible by {parts}: the nearest length is {near}."
    yield from _context_heads(flags, name)
    if flags.logging.eval_tasks:
        yield f"{name}: --eval-tasks needs whole samples in each process: use gptpar evaluate on a checkpoint."


def _context_heads(flags: Flags, name: str) -> Iterator[str]:
    """Check that a2a gives each process equally many heads, and whole groups of them with dropout of attention."""
    m, p = flags.model, flags.parallel
    size, tensor = p.context_parallel_size, p.tensor_model_parallel_size
    heads, groups = ((count or 0) // tensor for count in (m.num_attention_heads, m.num_query_groups))
    if p.cp_comm_type == "a2a" and heads % size:
        fit = ", ".join(str(i) for i in range(1, heads + 1) if heads % i == 0)
        yield (
            f"{name}: {heads} heads of a tensor rank are not divisible by {size}: give --cp-comm-type allgather; sizes "
            f"that fit: {fit}."
        )
    if m.attention_dropout and p.cp_comm_type == "a2a" and groups % size:
        yield (
            f"{name}: masks of --attention-dropout {m.attention_dropout:g} belong to whole query groups, and the "
            f"{groups} of a tensor rank are not divisible by {size}: give --cp-comm-type allgather, which computes "
            "attention for all tokens, or --attention-dropout 0."
        )
