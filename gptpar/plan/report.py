"""Formats a plan and a search as text and JSON, and draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from gptpar.pipeline import schedules
from gptpar.pipeline.schedules import Forward, Span
from gptpar.plan import matrices
from gptpar.plan.planner import Plan
from gptpar.plan.search import Search
from gptpar.plan.timing import rounds_idle
from gptpar.reporting.banner import Row, Section, banner, format_bytes, format_count, in_gib, ranges
from gptpar.reporting.figures.plan import ScheduleBars, draw_plan

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "outside")
"""Fields of :class:`~gptpar.plan.memory.RankMemory` that are in a GPU's memory, as columns of the table."""
TIMES = ("compute", "fill", "transfers", "data", "optimizer", "matrices", "cpu_optimizer", "bus", "host")
"""Fields of :class:`~gptpar.plan.timing.StepTime` whose sum is a step's time, as columns of the table."""
MAX_ROWS = 16
"""Longer pipelines show the first, the last and the fullest stages only."""
MAX_DRAWN_STAGES, MAX_DRAWN_ACTIONS = 16, 4000
"""Limits of the drawn schedule."""
RUNNERS_UP = 5
"""Number of layouts that a search lists behind the best one."""
PREDICTION_ERROR = 0.06
"""The most by which a measurement has exceeded the predicted memory, as a fraction of the prediction."""


def plan_text(plan: Plan, remedies: Sequence[Plan]) -> str:
    """Everything about one plan.

    Args:
        remedies: what would make a plan fit that does not (:func:`gptpar.plan.remedies.remedies`).
    """
    return "\n".join(
        [
            banner([Section("plan", _facts(plan)), Section("step expected", _times(plan))]),
            _title("memory of a stage's processes, GiB"),
            memory_table(plan),
            *_schedule(plan),
            verdict(plan, remedies),
        ]
    )


def _title(text: str) -> str:
    return f"--- {text} ".ljust(100, "-")


def _facts(plan: Plan) -> list[Row]:
    job, cluster = plan.job, plan.cluster
    m, recompute = job.config.model, job.config.recompute
    count, sizes = (
        format_count(job.num_parameters),
        f"{m.num_layers} layers x {m.hidden_size} x {m.num_attention_heads} heads",
    )
    if m.has_experts:
        sizes += f"; {m.num_experts} experts, a token uses {format_count(job.num_active_parameters)} parameters"
    rounds = rounds_idle(job.mesh.pipeline, job.num_micro_batches, job.num_virtual_stages)
    bubble = f", idle {100 * rounds / (job.num_micro_batches + rounds):.1f} % with even stages"
    virtual = job.num_virtual_stages
    schedule = "1F1B" if virtual == 1 else f"interleaved 1F1B, {virtual} virtual stages each"
    again = recompute.recompute_granularity or "nothing is computed again"
    return [
        Row("model", f"{count} parameters", sizes),
        Row(
            "cluster",
            f"{job.mesh.world_size:,} x {cluster.name.upper()}",
            f"{cluster.memory / 2**30:.1f} GiB, {cluster.peak / 1e12:.0f} TFLOP/s, {cluster.link_bandwidth / 1e9:.0f} "
            f"GB/s among {cluster.gpus_per_node} GPUs, {cluster.network_bandwidth / 1e9:.0f} GB/s a GPU "
            "between machines",
        ),
        Row("layout", f"{job.mesh.describe()}, ZeRO-{job.zero_stage}", f"recomputation: {again}"),
        Row(
            "batch",
            f"{job.config.batch.global_batch_size:,} samples x {job.shape.seq_length:,} tokens",
            f"{job.num_micro_batches:,} micro-batches of {job.micro_batch_size} a step",
        ),
        Row(
            "schedule",
            schedule + bubble if job.mesh.pipeline > 1 else "no pipeline",
            "one CUDA graph a step" if job.graph else "launched kernel by kernel",
        ),
        *_documents(plan),
        *_muon(plan),
        *_offload(plan),
        *_mirror(plan),
    ]


def _documents(plan: Plan) -> list[Row]:
    """Rows about documents: the lengths with which their attention is counted."""
    lengths = plan.job.document_lengths
    if not plan.job.config.data.reset_attention_mask:
        return []
    if lengths is None:
        return [Row("documents", "unknown", "attention is counted over whole samples; --data-path names a corpus")]
    mean, seen = sum(lengths) / len(lengths), sum(one * one for one in lengths) / sum(lengths)
    share = f"attention has {100 * seen / plan.job.shape.seq_length:.0f} % of whole samples' pairs"
    return [Row("documents", f"{mean:,.0f} tokens each within their samples", share)]


def _muon(plan: Plan) -> list[Row]:
    """Rows about an optimizer over matrices: what it computes and keeps."""
    job, flops = plan.job, matrices.flops_of_step(plan.job)
    if not flops:
        return []
    model = job.flops_per_token * job.config.batch.global_batch_size * job.shape.seq_length
    updated = {group for group, one in enumerate(job.layers.groups.factors) if one.by_matrix}
    units = (job.unit(number) for number in range(len(job.layers.kinds)))
    elements = sum(p.info.full_shape.numel() for unit in units for p in unit.params.values() if p.group in updated)
    return [
        Row(
            job.config.optimizer.optimizer,
            f"{flops / 1e12:.3g} TFLOP a step",
            f"{100 * flops / model:.1f} % of the model's, which alone count for MFU; {format_count(elements)} elements "
            f"of matrices, {format_bytes(elements * job.wide_size)} less state than with AdamW",
        )
    ]


def _offload(plan: Plan) -> list[Row]:
    """Rows about host memory: what is kept there."""
    job = plan.job
    moved = [f"{100 * job.ratio:g} % of the optimizer"] * (job.ratio > 0)
    moved += ["the parameters"] * job.config.offload.cpu_parameters
    moved += [f"what {len(job.offloaded)} blocks save for the backward pass"] * bool(job.offloaded)
    if not moved:
        return []
    when = "leave the GPU at once" if job.gradients_leave_at_once else "leave the GPU when they are used"
    when += f", and those of {100 * job.host_sums:g} % of the layers are added up on the host" * (job.host_sums > 0)
    if plan.double_buffers:
        moved.append(f"{format_bytes(plan.double_buffers)} of a machine's memory for its double buffers")
    reason = "" if plan.gradients is None else f": {plan.gradients.reason}"
    return [Row("host memory", " and ".join(moved), f"gradients {when}{reason}" if job.ratio else "")]


def _mirror(plan: Plan) -> list[Row]:
    """Rows about the memory mirror: what its copies take and cost."""
    cost = plan.mirror
    if cost is None:
        return []
    reason = f"{format_bytes(cost.process)} a process leave its GPU: at most {1e3 * cost.step_s:.2f} ms a step"
    if cost.sent_s:
        reason += f", and reach the next machine in {cost.sent_s:.1f} s while training goes on"
    if cost.sent_s > cost.interval * plan.time.total:
        least = math.ceil(cost.sent_s / plan.time.total)
        reason += f"; that is longer than the interval, and training waits: --mirror-interval {least} is the least"
    taken = f"each {cost.interval} steps, {format_bytes(cost.machine)} of a machine's memory"
    return [Row("memory mirror", taken, reason)]


def _times(plan: Plan) -> list[Row]:
    time, least = plan.time, plan.floors
    text = ", ".join(f"{part} {1e3 * getattr(time, part):.1f}" for part in TIMES if getattr(time, part) >= 5e-5)
    return [
        Row("time", f"{1e3 * time.total:.1f} ms", text),
        Row(
            "speed", f"{plan.tokens_per_second:,.0f} tokens/s", f"{100 * plan.utilisation:.1f} % MFU, causal attention"
        ),
        Row(
            "idle", f"{100 * time.idle:.1f} %", "of forward and backward: filling the pipeline, waiting, uneven stages"
        ),
        Row("cost", f"{plan.gpu_hours:,.1f} GPU hours", "for a billion tokens"),
        Row(
            "least time",
            f"{1e3 * least.longest:.1f} ms",
            f"products and attention {1e3 * least.products:.1f}"
            + (f", bus {1e3 * least.bus:.1f}, the CPU's pass {1e3 * least.host:.1f}: all can overlap" * plan.on_host),
        ),
    ]


def memory_table(plan: Plan) -> str:
    """A table with a row for each stage, GiB; of a long pipeline, the first, the last and the fullest."""
    stages = list(range(len(plan.memory)))
    if len(stages) > MAX_ROWS:
        stages = sorted({0, 1, plan.worst_stage, len(stages) - 2, len(stages) - 1})
    head = ("stage", *PARTS, "total", "host", "layers")
    rows: list[tuple[str, ...]] = [head]
    for stage in stages:
        memory = plan.memory[stage]
        sizes = [getattr(memory, part) for part in PARTS] + [memory.total, memory.host]
        layers = ranges(plan.job.split.layers_of(stage))
        rows.append((str(stage), *(f"{size / 2**30:.2f}" for size in sizes), layers))
    lines = ["  " + "  ".join(cell.rjust(len(title)) for cell, title in zip(row, head, strict=True)) for row in rows]
    for place, (before, after) in reversed(list(enumerate(pairwise(stages), 1))):
        if after != before + 1:
            lines.insert(place + 1, "    ...")
    return "\n".join(lines)


def timelines(plan: Plan) -> tuple[list[list[Span]], int]:
    """(spans of every stage in seconds, number of micro-batches that are drawn); a long step is drawn with fewer."""
    job, time = plan.job, plan.time
    stages, chunks = job.mesh.pipeline, job.num_virtual_stages
    most = max(stages, MAX_DRAWN_ACTIONS // (2 * stages * chunks))
    count = min(job.num_micro_batches, most, 4 * stages)
    slowest = max(time.stages, key=lambda stage: stage.both)
    return schedules.simulate(stages, count, chunks, slowest.forward / chunks, slowest.backward / chunks), count


def _schedule(plan: Plan) -> list[str]:
    stages = plan.job.mesh.pipeline
    if stages == 1:
        return []
    if stages > MAX_DRAWN_STAGES:
        return [_title("schedule"), f"  {stages} stages: --png FILE draws them"]
    _, count = timelines(plan)
    shown = "" if count == plan.job.num_micro_batches else f", drawn with {count} micro-batches"
    chart = schedules.chart(schedules.simulate(stages, count, plan.job.num_virtual_stages), 98)
    return [_title(f"schedule: letters are micro-batches, capitals forward{shown}"), chart]


def verdict(plan: Plan, remedies: Sequence[Plan]) -> str:
    """One paragraph: whether the plan fits, and if not, what to change."""
    if plan.fits:
        spare = plan.cluster.memory - plan.need
        tight = " That is less than the prediction's error." if spare < PREDICTION_ERROR * plan.need else ""
        return (
            f"\nfits: stage {plan.worst_stage} needs the most, and leaves {format_bytes(spare)} of a GPU free.{tight}"
        )
    lines = [f"\nOUT OF MEMORY: {plan.shortage()}"]
    enough = [p for p in remedies if p.fits]
    if enough:
        lines += ["any one of these makes it fit, fastest first:", *map(_remedy, enough[:RUNNERS_UP])]
    elif remedies:
        lines += [
            "nothing that was tried is enough; these save the most (gptpar plan --search tries combinations):",
            *map(_remedy, remedies[:3]),
        ]
    else:
        lines.append("nothing that was tried helps: take more or larger GPUs, or a smaller model.")
    return "\n".join(lines)


def _remedy(plan: Plan) -> str:
    host = f", {format_bytes(plan.host_need)} of a machine's memory" * plan.on_host
    return f"  {plan.flags():<44} {format_bytes(plan.need)} a GPU{host}, {1e3 * plan.time.total:.1f} ms a step"


def search_text(found: Search) -> str:
    """The best layout, the runners-up and the reasons of refusal, as text."""
    where = f" with {' and '.join(found.on_host)} in host memory" if found.on_host else ""
    lines = [_title(f"search{where}: {found.tried:,} layouts, {len(found.accepted):,} fit")]
    if found.accepted:
        lines.append("  step ms    tokens/s   MFU   idle   GiB  flags")
        lines += [_search_row(plan) for plan in found.accepted[: 1 + RUNNERS_UP]]
    else:
        lines.append("  none fits: take more or larger GPUs, or a smaller model.")
    lines.append(_title("refused"))
    for reason, (count, example) in sorted(found.refused.items(), key=lambda item: -item[1][0]):
        lines += [f"  {count:,} x {reason}; for example", f"      {example}"]
    return "\n".join(lines)


def _search_row(plan: Plan) -> str:
    rate, idle = 100 * plan.utilisation, 100 * plan.time.idle
    return (
        f"{1e3 * plan.time.total:9.1f} {plan.tokens_per_second:11,.0f} {rate:5.1f} {idle:6.1f} "
        f"{plan.need / 2**30:5.1f}  {plan.flags()}"
    )


def plan_json(plan: Plan, remedies: Sequence[Plan] = ()) -> dict[str, Any]:
    """A plan's figures for programs: GiB, milliseconds."""
    job, time = plan.job, plan.time
    return {
        "flags": plan.flags(),
        "layout": job.mesh.describe(),
        "world_size": job.mesh.world_size,
        "zero_stage": job.zero_stage,
        "parameters": job.num_parameters,
        "micro_batches": job.num_micro_batches,
        "fits": plan.fits,
        "shortage": plan.shortage() or None,
        "remedies": [{"flags": p.flags(), "fits": p.fits, "gib": in_gib(p.need, 3)} for p in remedies],
        "gib": in_gib(plan.need, 3),
        "host_gib_a_machine": in_gib(plan.host_need, 3),
        "double_buffers_gib_a_machine": in_gib(plan.double_buffers, 3),
        "mirror": plan.mirror
        and {
            "gib_a_process": in_gib(plan.mirror.process, 3),
            "gib_a_machine": in_gib(plan.mirror.machine, 3),
            "ms_a_step": round(1e3 * plan.mirror.step_s, 3),
            "s_to_the_neighbour": round(plan.mirror.sent_s, 3),
        },
        "stages": [
            {"layers": job.split.layers_of(stage), "allocated": in_gib(memory.allocated, 3), **memory.as_gib()}
            for stage, memory in enumerate(plan.memory)
        ],
        "ms_per_step": round(1e3 * time.total, 3),
        "ms": {part: round(1e3 * getattr(time, part), 3) for part in TIMES},
        "least_ms": {part: round(1e3 * value, 3) for part, value in asdict(plan.floors).items()},
        "idle": round(time.idle, 4),
        "tokens_per_s": round(plan.tokens_per_second, 1),
        "mfu_causal": round(plan.utilisation, 4),
        "gpu_hours_a_billion_tokens": round(plan.gpu_hours, 2),
    }


def search_json(found: Search) -> dict[str, Any]:
    """The best layout, the runners-up and the reasons of refusal, for programs."""
    return {
        "on_host": list(found.on_host),
        "tried": found.tried,
        "accepted": len(found.accepted),
        "best": plan_json(found.accepted[0]) if found.accepted else None,
        "runners_up": [plan_json(plan) for plan in found.accepted[1 : 1 + RUNNERS_UP]],
        "refused": [{"reason": r, "count": n, "example": example} for r, (n, example) in found.refused.items()],
    }


def draw(plan: Plan, path: Path) -> None:
    """Draw a PNG: the memory of each stage beside that of a GPU, and the schedule."""
    title = (
        f"{plan.job.mesh.describe()}, ZeRO-{plan.job.zero_stage}: {1e3 * plan.time.total:.1f} ms a step, "
        f"{in_gib(plan.need, 1):.1f} GiB"
    )
    memory = {part: [in_gib(getattr(stage, part)) for stage in plan.memory] for part in PARTS}
    draw_plan(path, title, memory, in_gib(plan.cluster.memory), _drawn_schedule(plan))


def _drawn_schedule(plan: Plan) -> ScheduleBars | None:
    if plan.job.mesh.pipeline == 1:
        return None
    stages, count = timelines(plan)
    forward, backward = (
        [[(1e3 * s.start, 1e3 * s.end) for s in spans if isinstance(s.action, Forward) is kind] for spans in stages]
        for kind in (True, False)
    )
    return ScheduleBars(forward, backward, count)
