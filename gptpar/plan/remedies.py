"""Proposes remedies for a plan that does not fit: single changes of the configuration, and the last resorts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gptpar.errors import ConfigError
from gptpar.plan.planner import Plan, Planner
from gptpar.plan.space import dimensions as d
from gptpar.plan.space.candidate import Changes


def remedies(planner: Planner, plan: Plan) -> list[Plan]:
    """Plans with changes that need less memory: those that fit, fastest first, then the others by their need.

    Each has a single change. If none of these fits, the last resorts with several changes are added.
    """
    single = list(_single_changes(plan))
    found = list(_with_less(planner, plan, single))
    if not any(changed.fits for changed in found):
        found += _with_less(planner, plan, [changes for changes in _last_resorts(plan) if changes not in single])
    return sorted(found, key=lambda p: (not p.fits, p.time.total if p.fits else p.need))


def _with_less(planner: Planner, plan: Plan, several: Iterable[Changes]) -> Iterator[Plan]:
    """The plans of those changes that are possible and need less memory than ``plan``."""
    for changes in several:
        try:
            changed = planner.plan(changes)
        except ConfigError:
            continue
        if changed.need < plan.need or changed.host_need < plan.host_need:
            yield changed


def _single_changes(plan: Plan) -> Iterator[Changes]:
    parallel, mesh = plan.job.config.parallel, plan.job.mesh
    if plan.job.config.recompute.checkpoint_in_cpu and not plan.fits_host:
        yield {**plan.changes, "recompute.checkpoint_in_cpu": False}
    if plan.job.offloaded and not plan.fits_host:
        yield {**plan.changes, d.OFFLOADED_LAYERS: 0}
    if plan.job.config.recompute.recompute_granularity != "full":
        yield {**plan.changes, **_recomputed(plan)}
    yield from _offloads(plan)
    if plan.job.micro_batch_size > 1:
        yield {**plan.changes, d.MICRO_BATCH: plan.job.micro_batch_size // 2}
    if plan.job.num_copies > 1:
        for stage in range(plan.job.zero_stage + 1, 4):
            yield {**plan.changes, d.ZERO_STAGE: stage}
    if mesh.tensor > 1 and not parallel.sequence_parallel:
        yield {**plan.changes, d.SEQUENCE_PARALLEL: True}
    for name, size in ((d.TENSOR, mesh.tensor), (d.PIPELINE, mesh.pipeline), (d.CONTEXT, mesh.context)):
        yield {**plan.changes, name: 2 * size}


def _recomputed(plan: Plan) -> Changes:
    """The changes for full recomputation, which leaves nothing to selective recomputation."""
    return {**d.RECOMPUTED, **({d.OFFLOADED_LAYERS: 0} if plan.job.offloaded else {})}


def _offloads(plan: Plan) -> Iterator[Changes]:
    """Changes that move to host memory: the optimizer, its gradients as soon as they are final, the parameters."""
    offload = plan.job.config.offload
    if plan.fits_gpu:
        return
    if plan.job.ratio < 1:
        yield {**plan.changes, **d.ON_CPU}
    if offload.cpu_optimizer and not offload.gradients_leave_at_once:
        yield {**plan.changes, d.OFFLOAD_GRADIENTS: "on"}
    if not offload.cpu_parameters:
        yield {**plan.changes, **d.PARAMETERS_ON_CPU}


def _last_resorts(plan: Plan) -> Iterator[Changes]:
    """Changes that move everything to host memory; then the same with full recomputation."""
    if plan.fits_gpu:
        return
    moved = {**plan.changes, **(d.ON_CPU if plan.job.ratio < 1 else {}), **d.PARAMETERS_ON_CPU}
    yield moved
    if plan.job.config.recompute.recompute_granularity != "full":
        yield {**moved, **_recomputed(plan)}
