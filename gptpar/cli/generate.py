"""``gptpar generate``: continue a prompt with a trained model, on a CPU or a GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint import Manifest, find_checkpoints, read_manifest, read_tensors
from gptpar.checkpoint.foreign import why_not_to_load
from gptpar.config import Config, ModelConfig
from gptpar.data.tokenizer import Tokenizer
from gptpar.errors import CheckpointError
from gptpar.model.gpt import gpt_model
from gptpar.pipeline.stage import Stage, memory_for
from gptpar.system.command_line import Parser, not_negative_int, positive_int
from gptpar.training.data import tokenizer_of
from gptpar.training.stored import stored_model


def load_model(
    folder: Path, device: torch.device, dtype: torch.dtype, iteration: int | None = None
) -> tuple[Stage, Config]:
    """The model of a run folder's newest whole checkpoint (or of one iteration), ready to give logits.

    Raises:
        CheckpointError: none that can be read.
    """
    if problem := why_not_to_load(folder):
        raise CheckpointError(problem)
    found = [path for number, path in find_checkpoints(folder) if iteration in (None, number)]
    if not found:
        what = "checkpoint" if iteration is None else f"checkpoint of iteration {iteration}"
        raise CheckpointError(f"there is no {what} in {folder}")
    problems: list[str] = []
    for path in found:
        try:
            manifest = read_manifest(path)
            config = stored_model(path, manifest.meta)
            _require_its_tensors(path, manifest, config.model)
            stage = Stage(gpt_model(config.model).specs)
            shapes = {name: tuple(parameter.shape) for name, parameter in stage.global_parameters().items()}
            _require_shapes(path, manifest, shapes)
            weights = read_tensors(path, [f"weights/{name}" for name in shapes])
        except CheckpointError as error:
            problems.append(str(error))
            print(f"skipped a checkpoint: {error}", file=sys.stderr)
            continue
        values = {name: weights[f"weights/{name}"].to(device, dtype) for name in shapes}
        stage.place(values | memory_for(stage.buffer_infos(), device))
        return stage.eval().requires_grad_(False), config
    raise CheckpointError(f"no checkpoint in {folder} can be read:\n" + "\n".join(problems))


def _require_its_tensors(path: Path, manifest: Manifest, model: ModelConfig) -> None:
    """A model larger than its checkpoint is not built: who wrote the sizes may have written any.

    Raises:
        CheckpointError: a size that no tensor has.
    """
    largest = max((size for entry in manifest.tensors.values() for size in entry.shape), default=0)
    limits = {"num_layers": len(manifest.tensors)} | dict.fromkeys(
        ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"), largest
    )
    for name, limit in (limits | {"padded_vocab_size": largest}).items():
        if getattr(model, name) > limit:
            raise CheckpointError(
                f"the meta of {path} says {name} {getattr(model, name):,}, but it holds {len(manifest.tensors):,} "
                f"tensors, none longer than {largest:,}; take another checkpoint with --ckpt-step N"
            )


def _require_shapes(path: Path, manifest: Manifest, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        entry = manifest.tensors.get(f"weights/{name}")
        if entry is not None and entry.shape != shape:
            raise CheckpointError(
                f"tensor 'weights/{name}' of {path} is {list(entry.shape)}, and {list(shape)} in the model that its "
                "meta describes; take another checkpoint with --ckpt-step N"
            )


@torch.no_grad()
def sample(
    stage: Stage,
    prompt: list[int],
    *,
    num_tokens: int,
    context: int,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int = 0,
    stop_at: int | None = None,
    seed: int = 1234,
) -> Iterator[int]:
    """Sample token after token, each from the whole context computed anew.

    Args:
        prompt: ids to continue; must not be empty.
        context: the model's sequence length; older tokens are forgotten.
        vocab_size: padding rows of the output beyond this are never chosen.
        temperature: 0 takes the likeliest token.
        top_k: choose among the k likeliest only; 0 among all.
        stop_at: end after this id.
    """
    device = next(stage.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-context:]], device=device)
        fields: dict[str, Any] = {"seq_length": window.shape[1]}
        logits = stage(window, fields)[-1, :vocab_size].float().cpu()
        if temperature < torch.finfo(logits.dtype).tiny:  # nothing to divide by: the limit of ever lower ones
            choice = int(logits.argmax())
        else:
            logits = (logits - logits.max()) / temperature  # at most 0, so that no temperature overflows
            if top_k:
                logits[logits < logits.topk(min(top_k, vocab_size)).values[-1]] = -torch.inf
            choice = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        yield choice
        tokens.append(choice)
        if choice == stop_at:
            return


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
