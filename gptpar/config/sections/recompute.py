"""Flags of activation recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class RecomputeOptions:
    """Options of recomputation that are complete as they are typed."""

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
    mlp_chunks_for_training: int = flag(
        1, "compute each MLP for N parts of the tokens, one after the other, and keep its input alone", least=1
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeFlags(RecomputeOptions):
    """Activation checkpointing: drop activations and compute them again in the backward pass."""

    recompute_activations: bool = flag(False, "same as --recompute-granularity selective")
    recompute_modules: tuple[str, ...] | None = flag(
        None,
        "parts recomputed by --recompute-granularity selective (default: core_attn); layernorm mlp_act: the outputs of "
        "norms and of the MLP's activation function",
        choices=("core_attn", "mlp", "mlp_act", "layernorm"),
    )
    checkpoint_activations: bool = flag(False, "same as --recompute-granularity full")
    activations_checkpoint_method: str | None = flag(
        None, "same as --recompute-granularity full --recompute-method WORD", choices=("uniform", "block")
    )
    checkpoint_num_layers: int | None = flag(
        None, "same as --recompute-method uniform --recompute-num-layers N", least=1
    )


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig(RecomputeOptions):
    """The activations that are dropped in the forward pass and computed again in the backward pass."""

    recompute_modules: tuple[str, ...] = ()
    """Parts of each block."""
