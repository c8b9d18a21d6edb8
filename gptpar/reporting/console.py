"""Formats the lines that a run prints: short ones for people, or Megatron-LM's, so that existing log parsers work.

In Megatron's line, fields that it does not print (tokens/s, MFU, progress, ETA) follow its last field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime

from gptpar.reporting.records import IterationRecord, TaskRecord, ValidationRecord


def iteration_line(record: IterationRecord, *, log_throughput: bool = False, now: datetime | None = None) -> str:
    """The line of ``--log-lines megatron``, with a timestamp.

    Args:
        log_throughput: whether to print TFLOP/s per GPU.
        now: default: the current time.
    """
    fields = [*_megatron_fields(record, log_throughput), *_own_fields(record)]
    return f" [{now or datetime.now():%Y-%m-%d %H:%M:%S.%f}]" + "".join(f" {field} |" for field in fields)


def short_line(record: IterationRecord, *, log_throughput: bool = False, now: datetime | None = None) -> str:
    """The default line: what people look at, the loss first; values that are asked for by flags follow.

    Args:
        log_throughput: whether to print TFLOP/s per GPU.
        now: default: the current time.
    """
    r = record
    fields = [f"iteration {r.iteration:8d}/{r.train_iters:8d}"]
    fields += [] if r.lm_loss is None else [f"loss {r.lm_loss:.4f}"]
    fields += [f"{name} {loss:.3g}" for name, loss in r.auxiliary_losses.items()]
    fields += [f"lr {r.learning_rate:.2e}"]
    fields += [] if r.grad_norm is None else [f"norm {r.grad_norm:.3g}"]
    fields += [] if r.params_norm is None else [f"weights' norm {r.params_norm:.4g}"]
    fields += [] if r.num_zeros is None else [f"zeros {r.num_zeros}"]
    fields += [] if r.loss_scale == 1 else [f"scale {r.loss_scale:g}"]
    counts = {"skipped": r.num_skipped, "nan": r.num_nan, "outliers": r.num_outliers}
    fields += [f"{name} {count}" for name, count in counts.items() if count]
    fields += [f"{r.tokens_per_s:,.{0 if r.tokens_per_s >= 100 else 1}f} tokens/s"]
    fields += [f"{_teraflops(r)} TFLOP/s"] if log_throughput else []
    fields += [] if r.mfu is None else [f"MFU {r.mfu:.1%}"]
    return f" {now or datetime.now():%H:%M:%S} " + " | ".join([*fields, f"ETA {format_duration(r.eta_s)}"])


def _teraflops(r: IterationRecord) -> str:
    return f"{r.tflops_per_gpu:.{1 if r.tflops_per_gpu >= 10 else 4}f}"  # a CPU reaches hundredths


def _megatron_fields(r: IterationRecord, log_throughput: bool) -> Iterator[str]:
    yield f"iteration {r.iteration:8d}/{r.train_iters:8d}"
    yield f"consumed samples: {r.consumed_samples:12d}"
    if r.skipped_samples > 0:
        yield f"skipped samples: {r.skipped_samples:12d}"
    yield f"elapsed time per iteration (ms): {r.elapsed_ms:.1f}"
    if log_throughput:
        yield f"throughput per GPU (TFLOP/s/GPU): {_teraflops(r)}"
    yield f"learning rate: {r.learning_rate:.6E}"
    yield f"global batch size: {r.global_batch_size:5d}"
    if r.lm_loss is not None:
        yield f"lm loss: {r.lm_loss:.6E}"
    for name, loss in r.auxiliary_losses.items():
        yield f"{name}: {loss:.6E}"
    yield f"loss scale: {r.loss_scale:.1f}"
    if r.grad_norm is not None:
        yield f"grad norm: {r.grad_norm:.3f}"
    if r.num_zeros is not None:
        yield f"num zeros: {r.num_zeros}"
    if r.params_norm is not None:
        yield f"params norm: {r.params_norm:.3f}"
    yield f"number of skipped iterations: {r.num_skipped:3d}"
    yield f"number of nan iterations: {r.num_nan:3d}"


def _own_fields(r: IterationRecord) -> Iterator[str]:
    if r.num_outliers is not None:
        yield f"number of outlier iterations: {r.num_outliers:3d}"
    yield f"tokens/s: {r.tokens_per_s:.1f}"
    if r.mfu is not None and r.mfu_causal is not None:
        yield f"MFU: {r.mfu:.1%} (causal {r.mfu_causal:.1%})"
    yield f"{r.progress:.1%} done"
    yield f"ETA: {format_duration(r.eta_s)}"


def timing_line(record: IterationRecord) -> str:
    """Times of an iteration, as measured on the host."""
    fields = [f"iteration: {record.elapsed_ms:.1f}"]
    if (cpu := record.cpu_optimizer) is not None:
        fields += [
            f"waited for the CPU optimizer: {cpu.waited:.1f}",
            f"CPU optimizer busy: {cpu.busy:.1f}",
            f"updated before the norm was known: {'none updated' if cpu.ahead is None else f'{cpu.ahead:.0%}'}",
            f"steps redone: {cpu.redone}",
        ]
    return "times (ms) | " + " | ".join(fields)


def validation_lines(record: ValidationRecord) -> str:
    """The three lines of an evaluation: the losses between two rules of dashes."""
    where = f"iteration {record.iteration}" + (" on test set" if record.split == "test" else "")
    values = f"lm loss value: {record.loss:.6E} | lm loss PPL: {record.perplexity:.6E}"
    line = f" validation loss at {where} | {values} | "
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def task_line(record: TaskRecord) -> str:
    """The scores of a task, and the time they took."""
    scores = record.scores
    shown = [f"{name}: {_with_error(scores, name)}" for name in scores if not name.endswith("_stderr")]
    speed = record.num_tokens / max(record.seconds, 1e-9)
    took = f"{record.num_items:,} items in {record.seconds:.1f} s ({speed:,.0f} tokens/s)"
    return f" {record.task} at iteration {record.iteration} | {' | '.join(shown)} | {took} |"


def _with_error(scores: Mapping[str, float], name: str) -> str:
    error = scores.get(f"{name}_stderr")
    return f"{scores[name]:.4f}" + ("" if error is None else f" +- {error:.4f}")


def format_duration(seconds: float) -> str:
    """``0:12:34`` for hours, minutes and seconds, ``2d 03:04:05`` with days, ``unknown`` if not finite."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, s = divmod(round(max(seconds, 0.0)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}d {h:02d}:{m:02d}:{s:02d}" if days else f"{h}:{m:02d}:{s:02d}"
