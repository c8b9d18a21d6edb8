"""Builds a run from its configuration, closes it in order, and explains errors of full memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch

from gptpar.checkpoint.ranks import Ranks
from gptpar.config import Config
from gptpar.config.fields import Derived
from gptpar.config.sections.offload import offload_gradients_obstacles
from gptpar.errors import GptparError, first_line, printable
from gptpar.optim.schedule import make_schedule
from gptpar.reporting.banner import format_bytes
from gptpar.reporting.guards import GuardedSink, guarded_console
from gptpar.reporting.sinks import Sink, make_sinks, require_packages
from gptpar.run import resume
from gptpar.run.auto_offload import with_gradients, with_ratio
from gptpar.run.banner import offload_line, refuse_what_cannot_fit, start_banner
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.data import Loaders, Vocabulary, make_loaders, vocabulary_of, with_vocabulary
from gptpar.run.evaluation.in_run import tasks_of
from gptpar.run.loop import Run
from gptpar.run.mirror import open_copies, open_mirror, restore
from gptpar.run.progress import Progress
from gptpar.run.recovery import RecoveryTimes
from gptpar.run.reporter import Reporter
from gptpar.run.run_folder.branches import is_inside
from gptpar.run.run_folder.folder import RunFolder, open_run_folder
from gptpar.run.same_everywhere import flags_of, inputs_of
from gptpar.run.saving import open_saving
from gptpar.run.trainer import Trainer
from gptpar.system.activity import Activity
from gptpar.system.determinism import deterministic, exact_bf16_sums
from gptpar.system.restart import Restart, note_begun
from gptpar.system.stop import StopRequest
from gptpar.topology.agreement import all_or_none, require_same
from gptpar.topology.groups import Topology, open_topology
from gptpar.topology.world import world_from_environment

ALLOCATOR, EXPANDS = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
"""The environment variable that configures torch's allocator, and a setting against gaps between tensors."""
ALLOCATORS = (ALLOCATOR, "PYTORCH_ALLOC_CONF")
"""All environment variables that configure it."""
SMALL_GAPS = 0.1
"""What the allocator may hold between tensors, as a share of theirs; the plan expects 0.04."""


@contextmanager
def memory_explained(in_force: Callable[[], Config]) -> Iterator[None]:
    """Turn an out-of-memory error, of a GPU or of the host, into one that says what to change.

    Args:
        in_force: returns the configuration when the error comes: by then ``auto`` may have become a number.

    Raises:
        GptparError: in its place.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        config = in_force()
        if isinstance(error, MemoryError):
            full = (
                f"this machine's memory is full (a very long run's order of samples needs some){_lower_offload(config)}"
            )
        elif isinstance(error, torch.OutOfMemoryError):
            full = f"the GPU's memory is full ({_in_use(config)}{_offload_gradients(config)}"
        elif "can't allocate memory" in str(error):  # the CPU's allocator has no exception of its own
            full = f"this machine's memory is full{_lower_offload(config)}"
        else:
            raise
        raise GptparError(
            f"{full} lower --micro-batch-size {config.batch.micro_batch_size}, add --recompute-granularity full, "
            f"shorten --seq-length {config.model.seq_length}, or choose a smaller model. "
            f"What failed: {first_line(error)}"
        ) from error


def _lower_offload(config: Config) -> str:
    """Advice for a full host, where the CPU optimizer's state and its double buffers may be what fills it."""
    return (
        ": set --offload-speculation off or a lower --cpu-optimizer-ratio, or" if config.offload.cpu_optimizer else ":"
    )


def _expand_segments(config: Config, device: torch.device) -> None:
    """Configure torch's allocator against gaps where weights come and go, unless the environment configures it."""
    if device.type == "cuda" and _expands_by_default(config):
        torch._C._accelerator_setAllocatorSettings(EXPANDS)


def _expands_by_default(config: Config) -> bool:
    return config.offload.cpu_parameters and not any(map(os.environ.get, ALLOCATORS))


def _in_use(config: Config) -> str:
    """How full the GPU was; if much of its memory lay in gaps that were too small, also how to avoid them."""
    used = torch.cuda.max_memory_allocated()
    gaps, were = torch.cuda.max_memory_reserved() - used, f"{format_bytes(used)} were in use"
    expands = any(EXPANDS in os.environ.get(name, "") for name in ALLOCATORS)
    if gaps <= SMALL_GAPS * used or expands or _expands_by_default(config):
        return f"{were}):"
    return f"{were}, {format_bytes(gaps)} in gaps between them): set {ALLOCATOR}={EXPANDS} in the environment,"


def _offload_gradients(config: Config) -> str:
    """Advice for a full GPU that keeps gradients: the flag is off, or ``auto`` has predicted too little."""
    offload, world_size = config.offload, world_from_environment()[2]
    cannot = not offload.cpu_optimizer or offload.ratio == 0 or config.precision.cuda_graph == "on"
    cannot = cannot or any(offload_gradients_obstacles(config, world_size))
    return "" if cannot or offload.gradients_leave_at_once else " set --offload-gradients on, or"


@contextmanager
def open_run(
    config: Config, derived: Sequence[Derived], without_effect: Sequence[str], more_sinks: Sequence[Sink] = ()
) -> Iterator[Run]:
    """Join the other processes, build everything, and close it all in order.

    Args:
        config: resolved.
        derived, without_effect: for the start banner.
        more_sinks: receive every record on the main process, beside the configured ones.
    """
    started = time.monotonic()
    resume.refuse_foreign_folders(config)
    parallel, world_size = config.parallel, world_from_environment()[2]
    mesh = parallel.mesh(world_size)
    with ExitStack() as stack:
        stack.enter_context(guarded_console())
        request = stack.enter_context(StopRequest().listening())
        stack.enter_context(memory_explained(lambda: config))
        activity = Activity.of_worker()
        stack.enter_context(activity.lost_ranks_explained())
        stack.enter_context(deterministic(config.precision.deterministic_mode))
        stack.enter_context(exact_bf16_sums(config.precision.disable_bf16_reduced_precision_matmul))
        minutes, facts = parallel.distributed_timeout_minutes, partial(flags_of, config)
        topology = stack.enter_context(
            open_topology(mesh, backend=parallel.distributed_backend, timeout_minutes=minutes, facts=facts)
        )
        _expand_segments(config, topology.device)
        say = _say if topology.is_main else lambda line: None
        times = RecoveryTimes(Restart.of_worker(), say)
        folder = stack.enter_context(_run_folder(config, say))
        local = stack.enter_context(_local_folder(config, say))
        with all_or_none(world_size):  # a file may be missing on one machine
            vocabulary = vocabulary_of(config.tokenizer)
            config = with_vocabulary(config, vocabulary)
            tasks = tasks_of(config)
            inputs = resume.Inputs.of(config, vocabulary.identity, mesh.data, vocabulary.files)
        require_same(inputs_of(inputs), "give all machines the same files.")
        copies = open_copies(config, say)
        done = resume.progress_to_resume(config, inputs)
        plan = BatchPlan.of(config.batch, done)
        config, decided = with_gradients(config, topology)
        say(start_banner(config, topology, plan, vocabulary, [*derived, *decided], without_effect))
        config = with_ratio(config, topology)
        refuse_what_cannot_fit(config, topology)
        loaders = _open_loaders(stack, config, topology, done, vocabulary, say)
        trainer = Trainer(config, topology, make_schedule(config, plan.train_samples), activity)
        stack.callback(trainer.close)
        if trainer.host is not None:
            say(offload_line(trainer.engine, trainer.host))
        times.mark("built")
        restore(copies, trainer)
        progress = resume.load(trainer, inputs, say)
        times.mark("loaded")
        if progress != done:  # the newest checkpoint is damaged, and an older one was loaded
            plan = BatchPlan.of(config.batch, progress)
            loaders = _open_loaders(stack, config, topology, progress, vocabulary, say)
            if not config.optimizer.use_checkpoint_opt_param_scheduler:
                trainer.schedule = make_schedule(config, plan.train_samples)
        if topology.is_main:
            log = config.logging
            require_packages(tensorboard=bool(log.tensorboard_dir), wandb=bool(log.wandb_project))
        writes = folder is not None and _put_in_order(folder, config, plan, progress)
        if writes and local is not None:
            _put_in_order(local, config, plan, progress)
        permits = [None if one is None else one.require_owner for one in (folder, local)]
        mirror = open_mirror(copies, trainer, progress.iteration, say)
        note_begun()
        sinks = [*more_sinks, times, *_sinks(config, topology, progress, say, writes)] if topology.is_main else []
        train = loaders["train"]
        lengths = train.documents.lengths if train and train.documents else None
        reporter = Reporter(config, plan, mesh.world_size, topology.device, sinks, say, lengths)
        stack.callback(reporter.close)
        saving = stack.enter_context(open_saving(trainer, inputs, say, reporter.flush, permits))
        request.hold()
        yield Run(trainer, progress, plan, loaders, reporter, request, say, started, saving, mirror, tasks)


def _open_loaders(
    stack: ExitStack,
    config: Config,
    topology: Topology,
    done: Progress,
    vocabulary: Vocabulary,
    say: Callable[[str], None],
) -> Loaders:
    """The loaders of a run that goes on from ``done``; the stack closes them."""
    loaders = make_loaders(config, topology, BatchPlan.as_configured(config.batch, done), vocabulary, say)
    for loader in loaders.values():
        if loader is not None:
            stack.callback(loader.close)
    return loaders


def _run_folder(config: Config, say: Callable[[str], None]) -> AbstractContextManager[RunFolder | None]:
    """The ``--save`` folder, for this run alone; none for a run that only reads."""
    folder, tensorboard = config.checkpoint.save, config.logging.tensorboard_dir
    if folder is None or config.logging.skip_train:
        return nullcontext()
    return open_run_folder(Path(folder), Path(tensorboard) if tensorboard else None, say)


def _local_folder(config: Config, say: Callable[[str], None]) -> AbstractContextManager[RunFolder | None]:
    """The ``--save-local`` folder, for this run alone.

    Raises:
        GptparError: the processes are on several machines, and each machine would hold a part of each checkpoint.
    """
    folder = config.checkpoint.save_local
    if folder is None or config.logging.skip_train:
        return nullcontext()
    machines = set(Ranks(None).each(lambda: os.uname().nodename))
    if len(machines) > 1:
        raise GptparError(
            f"--save-local {folder}: the run's processes are on {len(machines)} machines "
            f"({', '.join(sorted(machines))}), and no machine's disk would hold a whole checkpoint: leave it out, and "
            "save more often to --save, behind the training."
        )
    return open_run_folder(Path(folder), None, say)


def _put_in_order(folder: RunFolder, config: Config, plan: BatchPlan, progress: Progress) -> bool:
    """Make the folder ready for what this run writes.

    Returns:
        False if it writes nothing: it takes no step, and the folder has gone further than the loaded checkpoint.
    """
    if plan.finished(progress):
        return not folder.is_beyond(progress.iteration)
    c = config.checkpoint
    chosen = c.ckpt_step is not None
    folder.go_on_from(progress.iteration, progress.consumed_samples, anew=c.begins_anew, chosen=chosen)
    return True


def _sinks(
    config: Config, topology: Topology, progress: Progress, say: Callable[[str], None], writes: bool
) -> list[Sink]:
    """The main process's sinks; in the run folder only if this run writes there."""
    save = Path(config.checkpoint.save) if config.checkpoint.save else None

    def place(folder: str | None) -> Path | None:
        """A sink's folder; none where it is in a run folder that stays as it is."""
        kept = folder is not None and save is not None and not writes and is_inside(Path(folder), save)
        return None if folder is None or kept else Path(folder)

    sinks = make_sinks(
        config,
        run_folder=save if writes else None,
        place=place,
        resume_iteration=progress.iteration,
        resume_samples=progress.consumed_samples,
        world_size=topology.mesh.world_size,
        report=lambda sentence: say(f" > {sentence}"),
    )
    return [GuardedSink(sink) for sink in sinks]


def _say(lines: str) -> None:
    print("\n".join(map(printable, lines.split("\n"))), flush=True)  # a path may hold control characters
