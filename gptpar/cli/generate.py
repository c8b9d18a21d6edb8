"""``gptpar generate``: continue a prompt with a trained model, on a CPU or a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from gptpar.config import Config
from gptpar.data.tokenizer import Tokenizer
from gptpar.errors import CheckpointError
from gptpar.system.command_line import Parser, not_negative_int, positive_int
from gptpar.training.data import tokenizer_of
from gptpar.training.generation import load_model, sample


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:40]} is not a number of 0 or more")
    return value


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
    parser = Parser(prog="gptpar generate", description="Continue a prompt with a trained model, on a CPU or a GPU.")
    parser.add_argument("--load", required=True, type=Path, metavar="DIR", help="run folder with checkpoints")
    parser.add_argument(
        "--ckpt-step", type=not_negative_int, metavar="N", help="use this iteration instead of the newest"
    )
    parser.add_argument(
        "--prompt", type=str, default="", metavar="TEXT", help="text to continue (default: the start of a document)"
    )
    parser.add_argument("--num-tokens", type=positive_int, default=100, metavar="N", help="tokens to add")
    parser.add_argument(
        "--temperature", type=_temperature, default=0.8, metavar="X", help="0 takes the likeliest token"
    )
    parser.add_argument(
        "--top-k", type=not_negative_int, default=50, metavar="K", help="choose among the K likeliest; 0: all"
    )
    parser.add_argument("--seed", type=_seed, default=1234, metavar="N", help="seed of the sampling")
    parser.add_argument("--device", type=_device, metavar="NAME", help="cpu or cuda (default: a GPU if there is one)")
    parser.add_argument("--tokenizer-model", metavar="FILE", help="where the tokenizer's model is now, if it was moved")
    parser.add_argument("--vocab-file", metavar="FILE", help="where GPT-2 BPE's encoder.json is now, if it was moved")
    parser.add_argument("--merge-file", metavar="FILE", help="where GPT-2 BPE's vocab.bpe is now, if it was moved")
    return parser


def _tokenizer(config: Config, args: argparse.Namespace) -> Tokenizer:
    moved = {name: getattr(args, name) for name in ("tokenizer_model", "vocab_file", "merge_file")}
    tokenizer = tokenizer_of(config.update("tokenizer", **{k: v for k, v in moved.items() if v}))
    if tokenizer is None:
        raise CheckpointError(
            "the model was trained without a tokenizer (--vocab-size alone), so there is no text to make"
        )
    return tokenizer


def main(argv: list[str]) -> int:
    """Print the prompt and its continuation as it is sampled."""
    args = make_parser().parse_args(argv)
    device = args.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stage, config = load_model(args.load, device, dtype, args.ckpt_step)
    tokenizer = _tokenizer(config, args)
    assert config.model.seq_length
    prompt = tokenizer.encode(args.prompt) or [tokenizer.eod]
    made: list[int] = []
    for token in sample(
        stage,
        prompt,
        num_tokens=args.num_tokens,
        context=config.model.seq_length,
        vocab_size=tokenizer.vocab_size,
        temperature=args.temperature,
        top_k=args.top_k,
        stop_at=tokenizer.eod,
        seed=args.seed,
    ):
        made.append(token)
    print(args.prompt + tokenizer.decode(t for t in made if t != tokenizer.eod))
    return 0
