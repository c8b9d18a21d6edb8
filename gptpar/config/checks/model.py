"""The model's shape."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Config
from gptpar.config.fields import flag_name


def check_model(config: Config) -> Iterator[str]:
    """The model's shape."""
    m = config.model
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        if getattr(m, name) is None:
            yield f"the model's {name} is not known: give {flag_name(name)}, or a --preset such as 350M."
    hidden, heads = m.hidden_size, m.num_attention_heads
    if hidden and heads and hidden % heads and m.kv_channels == hidden // heads:
        yield (
            f"--hidden-size {hidden} is not divisible by --num-attention-heads {heads}: "
            f"use {hidden - hidden % heads} or {hidden - hidden % heads + heads}, or give --kv-channels."
        )
    if m.group_query_attention and not m.num_query_groups:
        yield "--group-query-attention needs --num-query-groups, the number of key/value heads."
    if m.num_query_groups and heads and heads % m.num_query_groups:
        yield (
            f"--num-attention-heads {heads} is not divisible by --num-query-groups {m.num_query_groups}; "
            f"divisors of {heads} are {', '.join(str(i) for i in range(1, heads + 1) if heads % i == 0)}."
        )
    if m.position_embedding_type == "rope" and m.kv_channels:
        rotated = int(m.kv_channels * m.rotary_percent)
        if rotated % 2 or not 2 <= rotated <= m.kv_channels:
            yield (
                f"rotary positions turn pairs of channels, but {m.rotary_percent:g} of a head of "
                f"{m.kv_channels} is {rotated}: choose an even number."
            )
    if m.seq_length and m.max_position_embeddings and m.max_position_embeddings < m.seq_length:
        yield (
            f"--max-position-embeddings {m.max_position_embeddings} is less than --seq-length {m.seq_length}: "
            f"raise it to {m.seq_length}."
        )
    for name in ("attention_dropout", "hidden_dropout"):
        if not 0 <= getattr(m, name) < 1:
            yield f"--{name.replace('_', '-')} is {getattr(m, name):g}; it must be at least 0 and less than 1."
