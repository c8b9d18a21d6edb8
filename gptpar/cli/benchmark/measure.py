"""``gptpar benchmark``: pretrain's own code path on synthetic tokens, summed up in one JSON line."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from gptpar.cli.benchmark.breakdown import TRACED_STEPS, UNTRACED_BEFORE, Tracer, table
from gptpar.cli.benchmark.machine import peak_memory
from gptpar.cli.flags import FACTS, add_flags
from gptpar.cli.launch import is_worker, start_workers, workers_wanted
from gptpar.config import Config, Flags
from gptpar.config.batch_sizes import BatchSizes, on_made_up_data, read_schedule
from gptpar.config.fields import Derived
from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.config.sections.precision import wants_graph
from gptpar.config.validate import resolve, with_defaults
from gptpar.exchange import take_shape_of_hf
from gptpar.model.gpt import gpt_model
from gptpar.plan.hardware import mfu
from gptpar.plan.host_updates import update_bytes
from gptpar.plan.job import Job
from gptpar.reporting.records import IterationRecord
from gptpar.reporting.sinks import Sink
from gptpar.run.assemble import open_run
from gptpar.run.checkpoint_args import with_checkpoint_args
from gptpar.run.loop import Run
from gptpar.run.reporter import device_peak
from gptpar.topology.mesh import COPIES
from gptpar.topology.world import world_from_environment

OF_A_RUN = ("checkpoint", "logging", "recovery")
"""Sections that say where a run keeps its state and its records, and how it goes on after a death."""


class _Times(Sink):
    """A sink that keeps every record."""

    name, keeps_records = "the benchmark", True

    def __init__(self) -> None:
        self.records: list[IterationRecord] = []

    def iteration(self, record: IterationRecord) -> None:
        self.records.append(record)


def parse(argv: list[str], more_flags: Callable[[argparse.ArgumentParser], None] | None = None) -> ParsedFlags:
    """Parse a benchmark's command line, and add values that it may leave out; values that the user gave stay.

    Args:
        argv: the words of the command line.
        more_flags: adds the flags of a verb that does more than one benchmark.

    Raises:
        ConfigError: a flag lacks its value.
    """

    def flags(parser: argparse.ArgumentParser) -> None:
        add_flags(parser, "benchmark")
        if more_flags is not None:
            more_flags(parser)

    parsed = parse_flags(argv, prog="gptpar benchmark", description=FACTS["benchmark"]["description"], extra=flags)
    if folder := parsed.flags.checkpoint.load_hf:
        take_shape_of_hf(parsed, folder)
    return _with_defaults(_without_run_folder(with_checkpoint_args(parsed)))


def _without_run_folder(parsed: ParsedFlags) -> ParsedFlags:
    """Leave out where the run of --config keeps its checkpoints and records: timed steps are no part of that run."""
    own = {key for key in parsed.from_config if key.split(".")[0] in OF_A_RUN}
    return dataclasses.replace(parsed, flags=with_defaults(parsed.flags, own), given=parsed.given - own)


def _with_defaults(parsed: ParsedFlags) -> ParsedFlags:
    steps = parsed.rest.steps + parsed.rest.warmup_steps
    if _traces(parsed):
        steps += UNTRACED_BEFORE + TRACED_STEPS
    flags = parsed.flags
    if flags.tokenizer.tokenizer_type is None and flags.tokenizer.vocab_size is None:
        flags = flags.update("tokenizer", vocab_size=50257)
    flags = flags.update("checkpoint", load=None, use_checkpoint_args=False)  # steps are timed, no run goes on
    flags, derived = _of_one_size(on_made_up_data(flags))
    flags = flags.update("batch", train_iters=steps, train_samples=None, train_tokens=None, train_minutes=None)
    flags = flags.update("logging", eval_iters=0, log_interval=max(1, steps))
    return dataclasses.replace(parsed, flags=flags, derived=[*parsed.derived, *derived])


def _of_one_size(flags: Flags) -> tuple[Flags, list[Derived]]:
    """Flags with one batch size, because steps of several sizes have no median: the last size is timed."""
    batch, derived = flags.batch, []
    if batch.rampup_batch_size is not None:
        flags = flags.update("batch", rampup_batch_size=None)
        derived = [Derived("rampup batch size", "none", "the batch that the ramp ends with is timed")]
    if batch.step_batch_size_schedule is not None:
        with contextlib.suppress(ValueError):  # reported when the configuration is resolved
            last = BatchSizes(read_schedule(batch.step_batch_size_schedule, 1)).last
            same = batch.global_batch_size or last  # another size is reported then, too
            if same == last:
                flags = flags.update("batch", step_batch_size_schedule=None, global_batch_size=last)
                derived.append(Derived("global batch size", last, "timed: the last of --step-batch-size-schedule"))
    return flags, derived


def _traces(parsed: ParsedFlags) -> bool:
    return parsed.rest.breakdown or parsed.rest.trace is not None


def result_line(config: Config, run: Run, records: list[IterationRecord], preset: str | None) -> dict[str, Any]:
    """The figures of the timed steps."""
    topology, shape = run.trainer.topology, run.config.model
    model = gpt_model(shape)
    ms = sorted(record.elapsed_ms for record in records)
    median = statistics.median(ms)
    tokens = run.plan.full * shape.seq_length
    per_s = tokens / median * 1e3
    per_gpu = per_s / topology.mesh.world_size
    peak, parallel = device_peak(config.precision.dtype, topology.device), config.parallel
    on_gpu = topology.device.type == "cuda"
    flops = partial(model.flops_per_token, document_lengths=run.reporter.document_lengths)
    return {
        "model": preset or f"{shape.num_layers}x{shape.hidden_size}x{shape.num_attention_heads}",
        "params": model.num_parameters,
        "tokens_per_s": round(per_s, 1),
        "tokens_per_s_per_gpu": round(per_gpu, 1),
        "ms_per_step": round(median, 3),
        "ms_min": round(ms[0], 3),
        "ms_max": round(ms[-1], 3),
        "mfu": _rounded(mfu(per_gpu, flops(causal=False), peak)),
        "mfu_causal": _rounded(mfu(per_gpu, flops(causal=True), peak)),
        **peak_memory(on_gpu),
        "loss": _rounded(records[-1].lm_loss),
        "layout": topology.mesh.describe(),
        "seq_length": shape.seq_length,
        "micro_batch_size": config.batch.micro_batch_size,
        "global_batch_size": run.plan.full,
        "tokens_per_step": tokens,
        "zero_stage": parallel.zero_stage,
        "pieces_per_stage": parallel.num_virtual_stages,
        "recompute": config.recompute.recompute_granularity,
        "cpu_offloading_num_layers": config.recompute.cpu_offloading_num_layers,
        "optimizer": config.optimizer.optimizer,
        **_cpu_optimizer(Job(run.config, topology.mesh), records),
        "cuda_graph": on_gpu and wants_graph(run.config, topology.mesh.size(*COPIES)),
        "precision": config.precision.dtype,
        "steps": len(ms),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }


def _cpu_optimizer(job: Job, records: Sequence[IterationRecord]) -> dict[str, Any]:
    config, times = job.config, [record.cpu_optimizer for record in records if record.cpu_optimizer is not None]
    if not times:
        return {"cpu_optimizer_ratio": config.offload.ratio}
    clip, updated = config.optimizer.clip_grad, sum(t.num_updated for t in times)
    updating_ms = max(1e-9, sum(t.updating for t in times))
    return {
        "cpu_optimizer_ratio": config.offload.ratio,
        "offload_gradients": config.offload.gradients_leave_at_once,
        "offload_gradients_ratio": config.offload.summed_ratio,
        "cpu_optimizer_wait_ms": _rounded(statistics.median(t.waited for t in times)),
        "cpu_optimizer_busy_ms": _rounded(statistics.median(t.busy for t in times)),
        "cpu_optimizer_gb_per_s": _rounded(updated * update_bytes(job) / updating_ms / 1e6),
        "cpu_optimizer_ahead": _rounded(sum(t.num_ahead for t in times) / updated if updated else None),
        "cpu_optimizer_redone_steps": sum(t.redone for t in times),
        "clipped_steps": sum(clip > 0 and (record.grad_norm or 0) > clip for record in records),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def measure(parsed: ParsedFlags, argv: list[str]) -> int:
    """Time the steps. The main process prints the line last; if a signal ended the run, it says that there is none.

    Args:
        argv: the command line that was parsed, for the workers.

    Raises:
        ConfigError: the configuration cannot run.
    """
    worker = is_worker()
    count = world_from_environment()[2] if worker else workers_wanted(parsed.flags.parallel.nproc_per_node)
    config, derived = resolve(parsed, count)
    if count > 1 and not worker:
        return start_workers(count, ["benchmark", *argv])
    times = _Times()
    timed = slice(parsed.rest.warmup_steps, parsed.rest.warmup_steps + parsed.rest.steps)
    with open_run(config, derived, parsed.without_effect, more_sinks=[times]) as run:
        tracer = Tracer(timed.stop) if _traces(parsed) else None
        run.train(each_step=tracer)
        taken, wanted = run.progress.iteration, config.batch.train_iters or 0
        if taken < wanted:  # in all processes alike
            run.say(f" > ended after {taken} of {wanted} steps: there is no result")
            if worker:  # torchrun takes anything but 0 for a crash
                return 0
            return 1 if run.request.signal is None else 128 + run.request.signal
        if tracer is not None:
            _show(tracer, parsed, run)
        if run.trainer.topology.is_main:
            print(json.dumps(result_line(config, run, times.records[timed], parsed.flags.model.preset)), flush=True)
    return 0


def _show(tracer: Tracer, parsed: ParsedFlags, run: Run) -> None:
    topology, path = run.trainer.topology, parsed.rest.trace
    if path is not None:
        host = run.trainer.host
        updates = () if host is None else tuple(host.latest_updates)
        tracer.save(path if topology.is_main else path.with_name(f"{path.name}.rank{topology.rank}"), updates)
    if parsed.rest.breakdown:
        ranks = topology.of_all(tracer.breakdown())
        if topology.is_main:
            print(table(ranks), flush=True)
