"""Converts the progress and schedule of a Megatron run to the form of our checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gptpar.errors import CheckpointError
from gptpar.exchange.megatron.arguments import count_in
from gptpar.exchange.megatron.found import Found
from gptpar.optim.loss_scale import LossScale
from gptpar.optim.schedule import Schedule


def progress_meta(found: Found, seq_length: int) -> dict[str, Any]:
    """The meta that lets a run go on; as ``training/stored.py`` reads it.

    The loss scale of fp16 begins anew.

    Raises:
        CheckpointError: the checkpoint does not say its iteration or its consumed samples.
    """
    given, beside = vars(found.arguments), found.beside
    named = (beside.get(name) for name in ("opt_param_scheduler", "lr_scheduler"))
    scheduler: dict[str, Any] = next((value for value in named if isinstance(value, dict)), {})
    iteration, samples = count_in(beside, "iteration"), count_in(given, "consumed_train_samples")
    if iteration is None or samples is None:
        raise CheckpointError(f"{found.path} does not say its iteration and its consumed_train_samples")
    scheduled = count_in(scheduler, "num_steps")
    return {
        "progress": {
            "iteration": iteration,
            "consumed_samples": samples,
            "scheduled_samples": samples if scheduled is None else scheduled,
            "skipped_iterations": count_in(beside, "skipped_steps") or 0,
            "nan_iterations": 0,
        },
        "optimizer_steps": found.steps,
        "loss_scale": LossScale(1.0, dynamic=False).state(),
        "schedule": dataclasses.asdict(_schedule({**given, **scheduler}, seq_length)),
    }


def _schedule(values: Mapping[str, Any], seq_length: int) -> Schedule:
    """The schedule of a run.

    Args:
        values: the arguments, overridden by the scheduler's state.
    """

    def number(*names: str) -> float:
        found = map(values.get, names)
        return next((value for value in found if isinstance(value, int | float) and not isinstance(value, bool)), 0)

    def word(name: str, default: str) -> str:
        return value if isinstance(value := values.get(name), str) else default

    in_tokens = values.get("lr_decay_tokens") is not None or values.get("lr_warmup_tokens") is not None
    unit, lengths = (seq_length, "tokens") if in_tokens else (1, "steps")
    wsd_tail = number("lr_wsd_decay_samples") or number("lr_wsd_decay_iters") * number("global_batch_size")
    return Schedule(
        max_lr=number("max_lr", "lr"),
        min_lr=number("min_lr"),
        init_lr=number("lr_warmup_init"),
        warmup=number(f"lr_warmup_{lengths}"),
        decay=number(f"lr_decay_{lengths}"),
        style=word("lr_decay_style", "linear"),
        wsd_tail=wsd_tail * unit,
        wsd_style=word("lr_wsd_decay_style", "exponential"),
        start_decay=number("start_wd", "start_weight_decay", "weight_decay"),
        end_decay=number("end_wd", "end_weight_decay", "weight_decay"),
        decay_style=word("wd_incr_style", "constant"),
        total=number("wd_incr_steps") * unit,
        in_tokens=in_tokens,
        decoupled_max=number("decoupled_lr") or None,
        decoupled_min=number("decoupled_min_lr", "min_lr") if number("decoupled_lr") else None,
    )
