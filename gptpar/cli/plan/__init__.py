"""``gptpar plan``: memory, schedule and speed of a run on any number of GPUs, without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from functools import partial
from typing import Any

from gptpar.adapter.deferred import deferred_init
from gptpar.adapter.user_module import SEED, is_named_in, load_user_function
from gptpar.cli.flags import FACTS, add_flags, parser_of
from gptpar.config import CheckpointConfig
from gptpar.config.batch_sizes import on_made_up_data
from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.config.run_file import run_file_text
from gptpar.config.sections.model import expand_preset
from gptpar.config.validate import range_problems
from gptpar.data.documents import lengths_in_corpora
from gptpar.errors import ConfigError, DataError
from gptpar.exchange import take_shape_of_hf
from gptpar.plan.hardware import GPUS, make_cluster, peak_flops
from gptpar.plan.module_memory import estimate_memory
from gptpar.plan.planner import Planner
from gptpar.plan.remedies import remedies
from gptpar.plan.report import draw, plan_json, plan_text, search_json, search_text
from gptpar.plan.search import search
from gptpar.plan.space.candidate import Changes
from gptpar.plan.space.dimensions import GLOBAL_BATCH, PRECISIONS
from gptpar.plan.space.spaces import samples_of
from gptpar.run.checkpoint_args import with_checkpoint_args
from gptpar.system.files import atomic_output
from gptpar.system.quantities import count, positive_gib

WRITTEN = "Chosen by gptpar plan. gptpar pretrain --config takes this file; other flags beside it count."


def _with_defaults(parsed: ParsedFlags) -> ParsedFlags:
    """Set values that a plan does not need; those that decide memory or speed stay."""
    flags = parsed.flags
    if flags.tokenizer.vocab_size is None:
        flags = flags.update("tokenizer", vocab_size=50257)
    if flags.batch.train_iters is None and not (flags.batch.train_samples or flags.batch.train_tokens):
        ramp = flags.batch.rampup_batch_size
        flags = flags.update("batch", **({"train_iters": 1} if ramp is None else {"train_samples": sum(ramp)}))
    flags = dataclasses.replace(on_made_up_data(flags), checkpoint=CheckpointConfig())
    flags = flags.update("logging", eval_iters=0, skip_train=False)
    return dataclasses.replace(parsed, flags=flags)


def _batch_of_tokens(parsed: ParsedFlags, problems: list[str]) -> Changes:
    """``--batch-tokens`` in samples."""
    tokens, batch = parsed.rest.batch_tokens, parsed.flags.batch
    length = expand_preset(parsed.flags, parsed.given)[0].model.seq_length
    if tokens is None or not length:
        return {}
    if batch.global_batch_size or batch.step_batch_size_schedule:
        problems.append("--batch-tokens and --global-batch-size or a schedule of it both say the batch: keep one.")
    if tokens < length:
        problems.append(f"--batch-tokens {tokens:,} is less than a sample of {length:,} tokens: raise it.")
    return {GLOBAL_BATCH: samples_of(tokens, length)}


def _chosen(parsed: ParsedFlags, problems: list[str]) -> Changes:
    """The choices of the plan itself: the batch by its tokens; a search in bf16 where one GPU's micro-batch is open."""
    options, chosen = parsed.rest, dict[str, Any](_batch_of_tokens(parsed, problems))
    batch = parsed.flags.with_values(chosen).batch
    chooses = options.world_size == 1 and batch.micro_batch_size is None and batch.gradient_accumulation_steps is None
    options.search = options.search or chooses
    no_batch = batch.global_batch_size is None and batch.step_batch_size_schedule is None
    if options.search and no_batch and options.world_size > 1:
        problems.append("--search needs --global-batch-size: layouts are compared at the same batch.")
    if chooses and not parsed.given & set(PRECISIONS) and peak_flops(GPUS[options.gpu].device, "bf16"):
        chosen["precision.bf16"] = True
    return chosen


def make_planner(argv: list[str]) -> tuple[Planner, argparse.Namespace]:
    """(the planner of a command line, the verb's own flags).

    Raises:
        ConfigError: the command line has mistakes.
    """
    extra = partial(add_flags, verb="plan", gpus=tuple(GPUS), positive_gib=positive_gib, count=count)
    parsed = parse_flags(argv, prog="gptpar plan", description=FACTS["plan"]["description"], extra=extra)
    if folder := parsed.flags.checkpoint.load_hf:
        take_shape_of_hf(parsed, folder)
    parsed = with_checkpoint_args(parsed)
    data = parsed.flags.data
    parsed = _with_defaults(parsed)
    problems = [*parsed.problems, *range_problems(parsed.flags)]
    options, chosen = parsed.rest, _chosen(parsed, problems)
    if problems:
        raise ConfigError(problems)
    parsed = dataclasses.replace(parsed, flags=parsed.flags.with_values(chosen))
    sizes = ("gpu_memory", "host_memory", "link_bandwidth", "network_bandwidth", "host_bandwidth", "gpus_per_node")
    machines = {name: getattr(options, name) for name in sizes}
    cluster = make_cluster(options.gpu, parsed.flags.precision.dtype, **machines)
    path, length, lengths = data.train_data_path or data.data_path, parsed.flags.model.seq_length, None
    if data.reset_attention_mask and path and length:
        with contextlib.suppress(DataError):  # a plan is often made where the corpus is not
            lengths = lengths_in_corpora(path, length)
    options.typed = parsed.typed
    return Planner(parsed.flags, parsed.given, options.world_size, cluster, lengths, chosen), options


def main(argv: list[str]) -> int:
    """Print the plan.

    Returns:
        0 if the run fits, 1 if it does not.
    """
    if is_named_in(argv):
        return _plan_module(argv)
    planner, options = make_planner(argv)
    found = search(planner) if options.search else None
    if found is not None and not found.accepted:
        print(json.dumps(search_json(found)) if options.json else search_text(found))
        return 1
    plan = found.accepted[0] if found is not None else planner.plan()
    changed = [] if plan.fits else remedies(planner, plan)
    if options.json:
        print(json.dumps(plan_json(plan, changed) if found is None else search_json(found)))
    else:
        print(plan_text(plan, changed))
        if found is not None:
            print(search_text(found))
    if options.png is not None:
        draw(plan, options.png)
    if options.write is not None:
        with atomic_output(options.write) as file:
            file.write(run_file_text({**options.typed, **plan.named_changes}, WRITTEN).encode())
    return 0 if plan.fits else 1


def _plan_module(argv: list[str]) -> int:
    """Predict the memory of a user's own module."""
    options = parser_of("plan --module").parse_args(argv)
    make = load_user_function(options.module)
    with deferred_init(seed=SEED):
        module = make().module
    memory = estimate_memory(module, options.config, options.nproc)
    if options.json:
        print(json.dumps({**dataclasses.asdict(memory), "device": memory.device, "host": memory.host}))
    else:
        print(memory)
    return 0
