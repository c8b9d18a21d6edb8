"""``gptpar fit``: choose model, sequence length, batch, number format and number of steps for the machine at hand.

It prints the vocabulary to make and then flags for ``gptpar pretrain`` on stdout, one in each line, and every choice
with its reason on stderr. With ``--run``, the run's folder keeps the choices, and the same ones are printed again as
long as preset, minutes and text are the same.
"""

from __future__ import annotations

import argparse
import sys
import time

from gptpar.cli.fit.choose import (
    LESSONS,
    PRESET,
    SHAPE_FLAGS,
    Choice,
    Course,
    choose,
    flag_names,
    for_command,
    teachable,
    training_minutes,
    vocabulary_for,
)
from gptpar.cli.fit.machine import Machine, measure_pace, this_machine
from gptpar.cli.fit.run_folder import MadeWith
from gptpar.cli.fit.text import LIBRARY, Text
from gptpar.cli.flags import parser_of
from gptpar.config.presets import PRESETS

GPU_MINUTES = 5.5


def choices_for(machine: Machine, args: argparse.Namespace, text: Text, preset: str | None) -> tuple[Choice, ...]:
    """Vocabulary and flags.

    Args:
        preset: the model, where the user says which.
    """
    vocabulary = vocabulary_for(machine, own_text=text.source != LIBRARY)
    vocab_size = args.vocab_size or int(vocabulary.value)
    asked = None if args.minutes is None else Choice("train-minutes", f"{args.minutes:g}", "as asked")
    if machine.num_gpus:
        minutes = asked or Choice("train-minutes", f"{GPU_MINUTES:g}", "")
        course = Course(Choice("preset", preset or PRESET, ""), minutes, LESSONS[0], 0)
    else:
        print("timing a few steps of training ...", file=sys.stderr, flush=True)
        now = time.time()
        pace = measure_pace(machine.precision)
        used = time.time() - (now if args.began is None else args.began)
        course = teachable(
            pace,
            preset,
            vocab_size,
            lambda parameters: asked or training_minutes(used, text.num_bytes, parameters, pace.slowness),
        )
    return vocabulary, *choose(machine, course, vocab_size)


def main(argv: list[str]) -> int:
    """Print flags on stdout and reasons on stderr."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = parser_of("fit", presets=tuple(PRESETS), preset=PRESET, minutes=GPU_MINUTES)
    args, given = parser.parse_args(argv[:cut]), argv[cut + 1 :]
    kept = MadeWith.read(args.run) if args.run else None
    text = Text.of(args.data, given, kept.text if kept else None)
    if kept is not None:
        kept.require_same(args.run, args.preset, args.minutes, text)
        if (steps := kept.finished(args.run, given)) is not None:
            print(
                f"{args.run} is finished: it has taken its {steps:,} steps. To train on, give more steps and let their "
                f"schedule count: --train-iters {2 * steps} --override-opt-param-scheduler. To begin anew, choose "
                "another folder with RUN=...",
                file=sys.stderr,
            )
            return 0
        print(f"as {args.run} was begun with:", file=sys.stderr)
    else:
        machine = this_machine()
        print(f"fitted to this machine: {machine.description}", file=sys.stderr)
        preset = args.preset or (PRESET if SHAPE_FLAGS & flag_names(given) else None)
        choices = choices_for(machine, args, text, preset)
        kept = MadeWith(choices[1].value, args.minutes, text, choices)
        if args.run:
            kept.write(args.run)
    vocabulary, *flags = kept.choices
    for choice in [vocabulary, *for_command(flags, given)]:
        print(f"  --{choice.flag} {choice.value}".ljust(28) + choice.reason, file=sys.stderr)
        print(f"--{choice.flag}" + (f"\n{choice.value}" if choice.value else ""))
    return 0
