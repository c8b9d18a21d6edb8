"""Checks activation recomputation."""

from __future__ import annotations

from collections.abc import Iterator

from gptpar.config import Flags, RecomputeFlags
from gptpar.config.fields import flag_name


def check_recompute(flags: Flags) -> Iterator[str]:
    """Whether the flags for recomputation agree with each other and with the layout."""
    r = flags.recompute
    yield from _switches(r)
    if r.recompute_granularity != "full":
        yield from _needs_full(r)
    if r.recompute_modules is not None and r.recompute_granularity != "selective":
        yield "--recompute-modules needs --recompute-granularity selective."
    groups = r.checkpoint_num_layers
    if groups is not None and (r.recompute_method, r.recompute_num_layers) != ("uniform", groups):
        yield (
            f"--checkpoint-num-layers {groups} means --recompute-method uniform --recompute-num-layers {groups}, but "
            f"{r.recompute_method} and {r.recompute_num_layers} are asked for, too: keep one."
        )
    if r.distribute_saved_activations:
        yield from _distributed(flags)


def _switches(r: RecomputeFlags) -> Iterator[str]:
    """The switches that stand for a granularity must not contradict it."""
    same_as = {"full": r.checkpoint_activations, "selective": r.recompute_activations}
    names = {"full": "--checkpoint-activations", "selective": "--recompute-activations"}
    for granularity, given in same_as.items():
        if given and r.recompute_granularity != granularity:
            yield (
                f"{names[granularity]} means --recompute-granularity {granularity}, but "
                f"{r.recompute_granularity} is asked for, too: keep one."
            )


def _needs_full(r: RecomputeFlags) -> Iterator[str]:
    """What is said of whole blocks, which only full recomputation has."""
    whole_blocks = {
        "recompute_method": r.recompute_method,
        "distribute_saved_activations": r.distribute_saved_activations or None,
        "checkpoint_in_cpu": r.checkpoint_in_cpu or None,
    }
    for name, value in whole_blocks.items():
        if value is not None:
            yield f"{flag_name(name)} needs --recompute-granularity full."


def _distributed(flags: Flags) -> Iterator[str]:
    if flags.parallel.sequence_parallel:
        yield (
            "--distribute-saved-activations (--partition-activations) saves nothing with --sequence-parallel, where "
            "each process holds only its own tokens already: drop it."
        )
