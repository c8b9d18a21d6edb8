"""The predictions of ``gptpar plan`` for a sweep's combinations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from gptpar.cli.benchmark.combinations import Combination
from gptpar.config import Flags
from gptpar.config.flags import ParsedFlags, flag_name
from gptpar.errors import ConfigError
from gptpar.plan.hardware import GIB, GPUS, make_cluster
from gptpar.plan.planner import Plan, Planner


def known_gpu() -> str | None:
    """The name that plan has for this machine's GPU; of several variants, the one with the most similar memory."""
    if not torch.cuda.is_available():
        return None
    device, memory = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / GIB
    names = [name for name, sheet in GPUS.items() if sheet.device in device]
    return min(names, key=lambda name: abs(GPUS[name].memory - memory), default=None)


def unknown_to_plan(flags: Flags) -> Iterator[str]:
    """Flags in use that change speed or memory, but that plan does not know."""
    for name in ("log_params_norm", "log_num_zeros_in_grad"):
        if getattr(flags.logging, name):
            yield flag_name(name)


def predict(parsed: ParsedFlags, chosen: Sequence[Combination], count: int) -> list[Plan]:
    """The plan of each combination.

    Raises:
        ConfigError: plan does not know the GPU, or its speed in this number format.
    """
    gpu = parsed.rest.sweep_gpu or known_gpu()
    if gpu is None:
        raise ConfigError(
            ["--sweep-top ranks by gptpar plan, which does not know this machine's GPU: name one with --sweep-gpu."]
        )
    flags = parsed.flags
    if flags.tokenizer.vocab_size is None:
        flags = flags.update("tokenizer", vocab_size=50257)
    planner = Planner(flags, parsed.given, count, make_cluster(gpu, flags.precision.dtype))
    return [planner.plan(combination.candidate.changes) for combination in chosen]


def most_promising(
    chosen: Sequence[Combination], plans: Sequence[Plan], most: int
) -> tuple[list[tuple[Combination, Plan]], list[Combination]]:
    """(the fastest combinations that are expected to fit, fastest first; the others, with the reason)."""
    ranked = sorted(zip(chosen, plans, strict=True), key=lambda pair: (not pair[1].fits, pair[1].time.total))
    kept = [pair for pair in ranked if pair[1].fits][:most]
    left = [dataclasses.replace(one, refusal=_why(plan)) for one, plan in ranked[len(kept) :]]
    return kept, left


def _why(plan: Plan) -> str:
    return f"plan expects {1e3 * plan.time.total:,.1f} ms" if plan.fits else f"plan says that {plan.shortage()}"
