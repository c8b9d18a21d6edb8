"""Flags of positions: learned or rotary, rotary frequencies for longer samples; and whether they agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gptpar.config.fields import Missing, Notes, flag, on_unless

if TYPE_CHECKING:
    from gptpar.config import ModelFlags

LLAMA_3_CONTEXT = 8192
"""Tokens of a sample in the first training of Llama 3.1, for whose form of rotary positions it is the default."""

SCALED_BY: dict[str, tuple[str, ...]] = {
    "rope_scaling_factor": ("linear", "dynamic", "llama3", "yarn"),
    "original_max_position_embeddings": ("dynamic", "llama3", "yarn"),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
    **dict.fromkeys(("yarn_beta_fast", "yarn_beta_slow", "yarn_attention_factor"), ("yarn",)),
    "yarn_correction_range_round_to_int": ("yarn",),
}
"""A field of scaled rotary frequencies -> the values of ``--rope-scaling-type`` with which it has a meaning."""

STRETCHING = frozenset({"rotary_base", "rope_scaling_type", *SCALED_BY})
"""Fields of rotary positions that a new run with a trained model's weights may set otherwise, for longer samples."""


NO_START = {"alibi": "ALiBi's distances do not depend on where positions start", "none": "there are no positions"}
"""Kinds of positions that are the same wherever they start, and why."""


@dataclass(frozen=True, kw_only=True)
class PositionOptions:
    """How positions enter a model."""

    position_embedding_type: str = flag(
        "learned_absolute",
        "how positions enter the model; alibi lowers a score by the distance of query and key (ALiBi)",
        choices=("learned_absolute", "rope", "alibi", "none"),
        spellings={"absolute": "learned_absolute", "rotary": "rope"},
    )
    rotary_base: int = flag(
        10000,
        "base of the rotary frequencies",
        names=("--rotary-position-embeddings-theta", "--rotary-theta"),
        above=0,
        most=10**12,
    )
    rotary_percent: float = flag(1.0, "share of each head's width that is rotated", above=0, most=1)
    rope_pattern: str | None = flag(
        None,
        "layers with rotary positions: a letter a layer, R rotary or N none, repeated over the layers (default: R)",
        metavar="RRRN",
    )
    rope_scaling_type: str | None = flag(
        None,
        "how rotary frequencies are lowered for samples longer than those of the first training: all of them, by the "
        "base (NTK-aware), as Llama 3.1, or as YaRN",
        choices=("linear", "dynamic", "llama3", "yarn"),
    )
    rope_scaling_factor: float = flag(
        8.0,
        "with --rope-scaling-type: divisor of the lowest frequencies",
        names=("--rotary-scaling-factor", "--yarn-rotary-scaling-factor"),
        least=1,
    )
    original_max_position_embeddings: int | None = flag(
        None,
        "with dynamic, llama3 (default: 8192) and yarn: tokens of a sample of the first training",
        names=("--rope-scaling-original-max-position-embeddings", "--yarn-original-max-position-embeddings"),
        least=1,
        most=100_000_000,
    )
    low_freq_factor: float = flag(
        1.0, "with llama3: frequencies of at most as many turns in such a sample are lowered by the factor", above=0
    )
    high_freq_factor: float = flag(4.0, "with llama3: frequencies of at least as many turns are kept", above=0)
    yarn_beta_fast: float = flag(
        32.0, "with yarn: turns in such a sample from which frequencies are kept", names=("--beta-fast",), above=0
    )
    yarn_beta_slow: float = flag(
        1.0, "with yarn: turns up to which they are lowered by the factor", names=("--beta-slow",), above=0
    )
    yarn_attention_factor: float | None = flag(
        None, "with yarn: factor of queries and of keys (default: 0.1 ln(factor) + 1)", above=0
    )
    yarn_correction_range_round_to_int: bool = on_unless(
        "--no-yarn-correction-range-round-to-int", "do not round the channels between YaRN's two limits to whole pairs"
    )


def check_rotation(m: ModelFlags) -> Iterator[str]:
    if m.position_embedding_type == "rope" and m.kv_channels:
        rotated = int(m.kv_channels * m.rotary_percent)
        if rotated % 2 or not 2 <= rotated <= m.kv_channels:
            yield (
                f"rotary positions turn pairs of channels, but {m.rotary_percent:g} of a head of "
                f"{m.kv_channels} is {rotated}: choose an even number."
            )


def check_scaling(m: ModelFlags) -> Iterator[str]:
    """Check how rotary frequencies are lowered."""
    kind, rotary = m.rope_scaling_type, m.position_embedding_type == "rope" or m.use_rotary_position_embeddings
    flag = "--use-rope-scaling" if m.use_rope_scaling else "--rope-scaling-type"
    if kind is not None and not rotary:
        yield f"{flag} changes rotary positions: give --position-embedding-type rope, or drop it."
    if m.use_rope_scaling and kind not in (None, "llama3"):
        yield f"--use-rope-scaling is --rope-scaling-type llama3, and {kind} is given: drop one of them."
    if kind in ("dynamic", "yarn") and m.original_max_position_embeddings is None:
        yield Missing(
            f"--rope-scaling-type {kind} starts from the samples of the first training: give their length, "
            "--original-max-position-embeddings."
        )
    yield from _scaling_numbers(m)


def _scaling_numbers(m: ModelFlags) -> Iterator[str]:
    """Whether the numbers of a form of scaled frequencies can be computed with."""
    kind = m.rope_scaling_type
    if kind == "llama3" and m.low_freq_factor >= m.high_freq_factor:
        yield (
            f"--low-freq-factor {m.low_freq_factor:g} must be less than --high-freq-factor {m.high_freq_factor:g}: "
            "Llama 3.1 has 1 and 4."
        )
    if kind == "yarn" and m.yarn_beta_slow >= m.yarn_beta_fast:
        yield (
            f"--yarn-beta-slow {m.yarn_beta_slow:g} must be less than --yarn-beta-fast {m.yarn_beta_fast:g}: "
            "YaRN has 1 and 32."
        )
    if kind == "yarn" and m.rotary_base == 1:
        yield "--rope-scaling-type yarn tells frequencies apart, and with --rotary-base 1 all are equal: raise it."
    if kind == "dynamic" and m.kv_channels and int(m.kv_channels * m.rotary_percent) == 2:
        yield "--rope-scaling-type dynamic needs two pairs of channels or more, and a head turns one: use another type."


def derive_positions(notes: Notes) -> None:
    """Derive the kind of positions from the older switches, and scaled frequencies from Megatron's."""
    model = notes.flags.model
    if model.use_rotary_position_embeddings and model.position_embedding_type != "rope":
        notes.replace("model", "position_embedding_type", "rope", "--use-rotary-position-embeddings")
    elif not model.add_position_embedding and model.position_embedding_type == "learned_absolute":
        notes.replace("model", "position_embedding_type", "none", "--no-position-embedding")
    kind = notes.flags.model.position_embedding_type
    if notes.flags.data.reset_position_ids and kind in NO_START:
        notes.replace("data", "reset_position_ids", False, NO_START[kind])
    if model.use_rope_scaling:
        notes.fill("model", "rope_scaling_type", "llama3", "--use-rope-scaling")
    if notes.flags.model.rope_scaling_type == "llama3":
        notes.fill("model", "original_max_position_embeddings", LLAMA_3_CONTEXT, "that of Llama 3.1")
