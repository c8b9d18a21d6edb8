"""Flags that name a DeepSpeed configuration."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFlags:
    """A DeepSpeed configuration that says what the command line leaves open."""

    deepspeed: bool = flag(False, "read --deepspeed_config, whose keys keep DeepSpeed's meaning")
    deepspeed_config: str | None = flag(
        None,
        "DeepSpeed's JSON, comments and trailing commas allowed: batch sizes, optimizer, schedule, clipping, number "
        "format, ZeRO stage and optimizer offload; with --lr, flags make the optimizer; other flags that contradict it "
        "are refused",
        names=("--deepspeed_config",),
        metavar="FILE",
    )
