"""Flags of outliers that are skipped, and of the norms and replicas that are watched."""

from __future__ import annotations

from dataclasses import dataclass

from gptpar.config.fields import flag, on_unless


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Numbers that go wrong: outliers, replicas, norms of layers."""

    skip_step_sigma: float | None = flag(
        None,
        "skip steps whose loss or gradient norm is more than X standard deviations above the mean of the last steps "
        "(OLMo: 6; default: off); weights and moments stay as they are, the schedules go on",
        above=0,
    )
    skip_step_window: int = flag(128, "number of steps in that mean; no step is skipped before half of them", least=2)
    spike_bundle: bool = on_unless(
        "--no-spike-bundle",
        "do not write the batch and the norms of the first 10 skipped outliers to SAVE/spikes",
    )
    check_replicas_interval: int | None = flag(
        None,
        "steps between comparisons of the weights that several processes hold, bit for bit; a difference ends the run",
        least=1,
        names=("--check-weight-hash-across-dp-replicas-interval",),
    )
    log_layer_norms_interval: int | None = flag(
        None,
        "steps between records of each layer's norms: of its output (root of the mean square), gradient and update; "
        "such a step takes a further forward pass and a copy of the master weights in host memory",
        least=1,
    )
