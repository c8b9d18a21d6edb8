"""Flags of activation recomputation, and whether they agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from gptpar.config.fields import Notes, Open, flag, flag_name

if TYPE_CHECKING:
    from gptpar.config import Flags


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(Generic[Open]):
    """The activations that are dropped in the forward pass and computed again in the backward pass."""

    recompute_granularity: str | None = flag(
        None, "what is recomputed: whole blocks, or parts of each block", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None,
        "whole blocks: all of them in groups of --recompute-num-layers, or only the first N of each pipeline stage",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = flag(
        None,
        "with uniform: blocks recomputed together (default: 1); otherwise: recompute only the first N blocks of each "
        "pipeline stage (default: all)",
        least=1,
        names=("--activations-checkpoint-num-layers",),
    )
    distribute_saved_activations: bool = flag(
        False,
        "split the saved inputs of recomputed blocks between the tensor-parallel processes",
        names=("--partition-activations", "--distribute-checkpointed-activations"),
    )
    checkpoint_in_cpu: bool = flag(False, "keep the saved inputs of recomputed blocks in host memory")
    cpu_offloading_num_layers: int = flag(
        0, "keep what N blocks, evenly spread, save for the backward pass in host memory", least=0
    )
    mlp_chunks_for_training: int = flag(
        1, "compute each MLP for N parts of the tokens, one after the other, and keep its input alone", least=1
    )
    recompute_modules: tuple[str, ...] | Open = flag(
        None,
        "parts recomputed by --recompute-granularity selective (default: core_attn); layernorm mlp_act: the outputs of "
        "norms and of the MLP's activation function",
        choices=("core_attn", "mlp", "mlp_act", "layernorm"),
        complete=(),
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags(RecomputeConfig[None]):
    """Activation checkpointing: drop activations and compute them again in the backward pass."""

    recompute_activations: bool = flag(False, "same as --recompute-granularity selective", before="recompute_modules")
    checkpoint_activations: bool = flag(False, "same as --recompute-granularity full")
    activations_checkpoint_method: str | None = flag(
        None, "same as --recompute-granularity full --recompute-method WORD", choices=("uniform", "block")
    )
    checkpoint_num_layers: int | None = flag(
        None, "same as --recompute-method uniform --recompute-num-layers N", least=1
    )


def check_recompute(flags: Flags) -> Iterator[str]:
    """Whether the flags for recomputation agree with each other and with the layout."""
    r = flags.recompute
    yield from _switches(r)
    if r.recompute_granularity != "full":
        yield from _needs_full(r)
    if r.recompute_modules is not None and r.recompute_granularity != "selective":
        yield "--recompute-modules needs --recompute-granularity selective."
    yield from _offloaded(r, flags.model.num_layers)
    groups = r.checkpoint_num_layers
    if groups is not None and (r.recompute_method, r.recompute_num_layers) != ("uniform", groups):
        yield (
            f"--checkpoint-num-layers {groups} means --recompute-method uniform --recompute-num-layers {groups}, but "
            f"{r.recompute_method} and {r.recompute_num_layers} are asked for, too: keep one."
        )
    if r.distribute_saved_activations:
        yield from _distributed(flags)


def _offloaded(r: RecomputeFlags, num_layers: int | None) -> Iterator[str]:
    """Blocks whose saved tensors are in host memory."""
    count = r.cpu_offloading_num_layers
    if num_layers is not None and count > num_layers:
        yield f"--cpu-offloading-num-layers {count} is more than --num-layers {num_layers}: give at most {num_layers}."
    if count and r.recompute_granularity == "full":
        yield (
            f"--cpu-offloading-num-layers {count} is for blocks that are not recomputed as a whole: give "
            "--checkpoint-in-cpu, which keeps the inputs of those that are in host memory, or --recompute-granularity "
            "selective."
        )


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
    """Check options of whole blocks, which full recomputation alone has."""
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


def derive_recompute(notes: Notes) -> None:
    r = notes.flags.recompute
    if r.checkpoint_activations:
        notes.fill("recompute", "recompute_granularity", "full", "--checkpoint-activations")
    if r.activations_checkpoint_method is not None:
        reason = f"--activations-checkpoint-method {r.activations_checkpoint_method}"
        notes.fill("recompute", "recompute_granularity", "full", reason)
        notes.fill("recompute", "recompute_method", r.activations_checkpoint_method, reason)
    if r.recompute_activations:
        notes.fill("recompute", "recompute_granularity", "selective", "--recompute-activations")
    if notes.flags.recompute.recompute_granularity != "full":
        _derive_whole_blocks(notes)
    elif r.checkpoint_num_layers is not None:
        reason = f"--checkpoint-num-layers {r.checkpoint_num_layers}"
        notes.fill("recompute", "recompute_method", "uniform", reason)
        notes.fill("recompute", "recompute_num_layers", r.checkpoint_num_layers, reason)
    if notes.flags.recompute.recompute_granularity == "selective":
        notes.fill("recompute", "recompute_modules", ("core_attn",), "Megatron's default")
    _derive_saved_inputs(notes)


def _derive_whole_blocks(notes: Notes) -> None:
    """Ignore how whole blocks are recomputed where none are, as Megatron does."""
    names = ["recompute_num_layers", "checkpoint_num_layers"]
    if notes.flags.recompute.recompute_granularity is None:
        names.append("recompute_method")
    for name in names:
        if getattr(notes.flags.recompute, name) is not None:
            notes.replace("recompute", name, None, "no whole blocks are recomputed: see --recompute-granularity full")


def _derive_saved_inputs(notes: Notes) -> None:
    """Derive where inputs of recomputed blocks are kept; it is ignored without any, as in Megatron-DeepSpeed."""
    r = notes.flags.recompute
    if r.recompute_granularity is None:
        for name in ("checkpoint_in_cpu", "distribute_saved_activations"):
            if getattr(r, name):
                notes.replace("recompute", name, False, "nothing is recomputed: see --recompute-granularity full")
    elif r.distribute_saved_activations and notes.flags.parallel.tensor_model_parallel_size == 1:
        reason = "--tensor-model-parallel-size is 1: nobody to share with"
        notes.replace("recompute", "distribute_saved_activations", False, reason)
