"""``gptpar generate``: continue prompts with a trained model, on a CPU or a GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from unicodedata import category

import torch

from gptpar.cli.flags import parser_of
from gptpar.cli.given_tokenizer import add_tokenizer_flags, given_tokenizer
from gptpar.data.tokenizer import Tokenizer
from gptpar.data.tokenizer.base import REPLACEMENT
from gptpar.errors import ConfigError, printable
from gptpar.run.generation import load_model
from gptpar.run.sampling import Continuation, Sampling, continue_texts, make_texts


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a number of 0 or more")
    return value


def _fraction(text: str) -> float:
    value = _temperature(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not above 0 and at most 1")
    return value


def _not_nothing(text: str) -> str:
    """An argparse type: a text that is not empty; white space alone is a text, too."""
    if not text:
        raise argparse.ArgumentTypeError("is empty: give a text, or leave the flag out")
    return text


def _seed(text: str) -> int:
    if not text.isdecimal() or len(text) > 20 or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a whole number from 0 to 2^64 - 1")
    return int(text)


def _device(text: str) -> torch.device:
    names = ["cpu", "cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if text not in names or (text == "cuda" and not torch.cuda.is_available()):
        usable = ", ".join(names if torch.cuda.is_available() else names[:1])
        raise argparse.ArgumentTypeError(f"{text} is not usable on this machine; choose from {usable}")
    return torch.device(text)


def make_parser() -> argparse.ArgumentParser:
    """The verb's flags."""
    types = {"temperature": _temperature, "fraction": _fraction, "not_nothing": _not_nothing, "seed": _seed}
    parser = parser_of("generate", **types, device=_device)
    add_tokenizer_flags(parser)
    return parser


class _Printer:
    """Turns a growing list of tokens into text that is final, up to a stop text.

    Args:
        stop: texts at which the continuation ends; they are left out.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._tokenizer, self._stop, self._shown = tokenizer, stop, 0
        self.text, self.stopped = "", False

    def take(self, made: Sequence[int], *, last: bool) -> str:
        """The new part of the text of all tokens so far, without text at its end that later tokens may change.

        That is a character with missing bytes, or what may be the beginning of a stop text.
        """
        text = self._tokenizer.decode(token for token in made if token != self._tokenizer.eod)
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        self.stopped = bool(ends)
        text = text[: min(ends)] if ends else text
        final = len(text)
        if not (last or ends):
            final = len(text.rstrip(REPLACEMENT)) - max([len(stop) - 1 for stop in self._stop], default=0)
        new = _without_controls(text[self._shown : max(final, self._shown)])
        self._shown = max(final, self._shown)
        self.text += new
        return new


def _prompts(args: argparse.Namespace) -> list[str]:
    """The texts to continue.

    Raises:
        ConfigError: a file cannot be read, or has no lines.
    """
    if args.prompts is None:
        return args.prompt or [""]
    try:
        text = args.prompts.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([f"--prompts {args.prompts} cannot be read: {reason}; give a file of UTF-8 text."]) from None
    lines = text.removesuffix("\n").split("\n")  # str.splitlines ends lines at U+2028, a form feed and others, too
    if not text:
        raise ConfigError([f"--prompts {args.prompts} has no lines: write a prompt on each line."])
    return [*(args.prompt or []), *lines]


def main(argv: list[str]) -> int:
    """Print each prompt and its continuation; a single one as it is sampled."""
    args = make_parser().parse_args(argv)
    prompts = _prompts(args)
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stage, stored = load_model(args.load, device, dtype, args.ckpt_step)
    tokenizer = given_tokenizer(stored, args)
    how = Sampling(
        num_tokens=args.num_tokens,
        context=stored.model.seq_length,
        vocab_size=tokenizer.vocab_size,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        stop_at=tokenizer.eod,
        seed=args.seed,
    )
    texts = make_texts([tokenizer.encode_prompt(prompt) for prompt in prompts], how)
    printers = [_Printer(tokenizer, args.stop or ()) for _ in prompts]
    steps = continue_texts(stage, texts, how)
    if len(prompts) == 1 and (args.stream or sys.stdout.isatty()):
        print(prompts[0], end="", flush=True)
        for _ in steps:
            print(_take(texts[0], printers[0]), end="", flush=True)
        print(printers[0].take(texts[0].made, last=True))
        return 0
    for _ in steps:
        _take_all(texts, printers if args.stop else ())
    for number, (prompt, text, printer) in enumerate(zip(prompts, texts, printers, strict=True), 1):
        printer.take(text.made, last=True)
        print(f"--- {number} of {len(prompts)}\n" * (len(prompts) > 1) + prompt + printer.text)
    return 0


def _take_all(texts: Sequence[Continuation], printers: Sequence[_Printer]) -> None:
    for text, printer in zip(texts, printers, strict=False):
        _take(text, printer)


def _take(text: Continuation, printer: _Printer) -> str:
    """The new part of a text, which is complete if it contains a stop text."""
    new = printer.take(text.made, last=text.is_complete)
    text.is_complete |= printer.stopped
    return new


def _without_controls(text: str) -> str:
    """Text of a model with control characters escaped, except line ends and tabs: a terminal would obey them."""
    return "".join(printable(c) if category(c) == "Cc" and c not in "\n\t" else c for c in text)
