"""``gptpar evaluate``: scores of a checkpoint on tasks, by one process or several."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from gptpar.cli.flags import parser_of
from gptpar.cli.given_tokenizer import add_tokenizer_flags, given_files, given_tokenizer
from gptpar.cli.launch import is_worker, start_workers, workers_wanted
from gptpar.errors import CheckpointError, ConfigError, TokenizerError
from gptpar.exchange import tokenizer_of_checkpoint
from gptpar.model.dtypes import DTYPES
from gptpar.reporting.console import task_line
from gptpar.reporting.records import TaskRecord
from gptpar.run.evaluation.checkpoint import layout_problems, load_pipeline
from gptpar.run.evaluation.evaluator import Evaluator
from gptpar.run.evaluation.items import all_problems
from gptpar.run.evaluation.tasks import read_tasks
from gptpar.run.generation import newest_model
from gptpar.system.activity import Activity
from gptpar.system.stop import StopRequest
from gptpar.topology.groups import Topology, open_topology
from gptpar.topology.mesh import Mesh
from gptpar.topology.world import world_from_environment


def make_parser() -> argparse.ArgumentParser:
    """The verb's flags."""
    dtypes = sorted(DTYPES)
    parser = parser_of("evaluate", dtypes=dtypes, names=", ".join(dtypes))
    add_tokenizer_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    """Read the tasks, start workers if that is still to be done, and evaluate."""
    args = make_parser().parse_args(argv)
    worker = is_worker()
    count = world_from_environment()[2] if worker else workers_wanted(args.nproc_per_node)
    _check(args, count)
    if count > 1 and not worker:
        return start_workers(count, ["evaluate", *argv])
    tensor, pipeline, expert = _sizes(args)
    mesh = Mesh(count // (tensor * pipeline), tensor, pipeline, expert)
    activity = Activity.of_worker()
    with (
        StopRequest().listening() as request,
        activity.lost_ranks_explained(),
        open_topology(
            mesh, backend=None, timeout_minutes=10.0, facts=lambda: {"the command line": " ".join(argv)}
        ) as topology,
    ):
        found = evaluate(args, topology, request, activity)
        if found is not None and topology.is_main:
            print(json.dumps(found, indent=2), flush=True)
    return 0 if found is not None or worker or request.signal is None else 128 + request.signal


def _sizes(args: argparse.Namespace) -> tuple[int, int, int]:
    """The sizes of the tensor, the pipeline and the expert axis."""
    return args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size


def _check(args: argparse.Namespace, count: int) -> None:
    """Check tasks, checkpoint, its tokenizer and layout before any process is started, and nothing else is read.

    Raises:
        CheckpointError, TokenizerError: the checkpoint cannot be read, or its tokenizer's files; nothing else is wrong.
        ConfigError: with all problems.
    """
    problems = list(all_problems(args.eval_tasks))
    try:
        stored = newest_model(args.load, args.ckpt_step)
        tokenizer_of_checkpoint(stored, given_files(args))
    except (CheckpointError, TokenizerError) as error:
        if not problems:
            raise
        problems.append(str(error))
    else:
        problems += layout_problems(stored.model, *_sizes(args), world_size=count)
    if problems:
        raise ConfigError(problems)


def evaluate(
    args: argparse.Namespace, topology: Topology, request: StopRequest, activity: Activity
) -> dict[str, Any] | None:
    """The JSON object to print: the checkpoint and each task's scores; ``None`` after a request to stop."""
    dtype = DTYPES[args.dtype or ("bf16" if topology.device.type == "cuda" else "fp32")]
    model = load_pipeline(args.load, topology, dtype, args.ckpt_step)
    stored, iteration = model.loaded.stored, model.loaded.iteration
    context = stored.model.seq_length
    tasks = read_tasks(args.eval_tasks, given_tokenizer(stored, args), context, args.eval_limit)
    evaluator = Evaluator(model.pipeline, topology, context, args.micro_batch_size * context, activity.note)
    request.hold()  # until here nobody waits for this process to come to a batch's end
    scores: dict[str, Any] = {}
    for task in tasks:
        found = evaluator.evaluate(task, lambda: topology.any_rank(request.signal is not None))
        if found is None:
            if topology.is_main:
                done = f"{len(scores)} of {len(tasks)} tasks"
                print(f" > stopped after {done}: there is no result", file=sys.stderr, flush=True)
            return None
        sizes = {"num_items": found.num_items, "num_tokens": found.num_tokens, "seconds": found.seconds}
        scores[task.name] = {**found.scores, **sizes}
        if topology.is_main:
            record = TaskRecord(**vars(found), iteration=iteration, consumed_samples=0, consumed_tokens=0)
            print(task_line(record), file=sys.stderr, flush=True)
    of_checkpoint = {"checkpoint": str(model.loaded.path), "iteration": iteration}
    return {**of_checkpoint, "eval_limit": args.eval_limit, "tasks": scores}
