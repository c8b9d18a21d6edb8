"""``gptpar fit``: choose a model's sequence length, batch, number format and number of steps for the machine at hand.

It prints the vocabulary to make and then flags for ``gptpar pretrain`` on stdout, one in each line, and every choice
with its reason on stderr. With ``--run``, the run's folder keeps the choices, and the same ones are printed again as
long as preset, minutes and text are the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gptpar.cli.fit.choose import Choice, choose, for_command, training_minutes, vocabulary_for
from gptpar.cli.fit.machine import Machine, this_machine
from gptpar.cli.fit.run_folder import MadeWith
from gptpar.cli.fit.text import LIBRARY, Text
from gptpar.config.presets import PRESETS
from gptpar.system.command_line import Parser, positive_float, positive_int

GPU_MINUTES = 5.5


def make_parser() -> argparse.ArgumentParser:
    """The verb's flags."""
    epilog = "Words after -- are flags for gptpar pretrain; values that they set are not chosen."
    parser = Parser(prog="gptpar fit", description=(__doc__ or "").replace("``", ""), epilog=epilog)
    parser.add_argument("--preset", default="350M", choices=tuple(PRESETS), help="the model")
    parser.add_argument(
        "--minutes",
        type=positive_float,
        metavar="X",
        help=f"training time to aim at (default: {GPU_MINUTES} on GPUs, on a CPU what is left of twelve minutes)",
    )
    parser.add_argument(
        "--vocab-size", type=positive_int, metavar="N", help="vocabulary of the data, if it exists already"
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="FOLDER",
        help="folder that keeps the choices; if it has some, they are printed again",
    )
    parser.add_argument("--data", metavar="PATH", help="the text (default: Python's standard library)")
    parser.add_argument(
        "--seconds-used", type=float, default=0.0, metavar="S", help="time that the command has taken until now"
    )
    return parser


def choices_for(machine: Machine, args: argparse.Namespace, text: Text) -> tuple[Choice, ...]:
    """Vocabulary and flags."""
    vocabulary = vocabulary_for(machine, own_text=text.source != LIBRARY)
    if args.minutes is not None:
        minutes = Choice("train-minutes", f"{args.minutes:g}", "as asked")
    elif machine.num_gpus:
        minutes = Choice("train-minutes", f"{GPU_MINUTES:g}", "")
    else:
        minutes = training_minutes(args.seconds_used, text.num_bytes)
    return vocabulary, *choose(machine, args.preset, args.vocab_size or int(vocabulary.value), minutes)


def main(argv: list[str]) -> int:
    """Print flags on stdout and reasons on stderr."""
    cut = argv.index("--") if "--" in argv else len(argv)
    args, given = make_parser().parse_args(argv[:cut]), argv[cut + 1 :]
    kept = MadeWith.read(args.run) if args.run else None
    text = Text.of(args.data, given, kept.text if kept else None)
    if kept is not None:
        kept.require_same(args.run, args.preset, args.minutes, text)
        print(f"as {args.run} was begun with:", file=sys.stderr)
    else:
        machine = this_machine()
        print(f"fitted to this machine: {machine.description}", file=sys.stderr)
        kept = MadeWith(args.preset, args.minutes, text, choices_for(machine, args, text))
        if args.run:
            kept.write(args.run)
    vocabulary, *flags = kept.choices
    for choice in [vocabulary, *for_command(flags, given)]:
        print(f"  --{choice.flag} {choice.value}".ljust(28) + choice.reason, file=sys.stderr)
        print(f"--{choice.flag}" + (f"\n{choice.value}" if choice.value else ""))
    return 0
