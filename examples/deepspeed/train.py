"""Trains an unmodified transformers model with ZeRO-3, its parameters and optimizer in host memory.

gptpar launch --num_gpus 2 train.py --model-name FOLDER --steps 100 --deepspeed --deepspeed-config ds_zero3_offload.json
sbatch run.sbatch --model-name config.json --steps 100 --text my.txt --save runs/hf

FOLDER holds a model as transformers saves it. With its weights, training goes on from them; with a config.json alone
(or its path), the model begins at random, and no process ever holds all of it. Tokens are those of the folder's
tokenizer, or the text's bytes where it has none. The same command goes on from --save, if it holds a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from gptpar.system.command_line import needed_packages

with needed_packages():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

    import gptpar.deepspeed as deepspeed
    from common import initialize, make_parser, read_config, report, train_step


def make_model(source: Path, *, plain: bool) -> PreTrainedModel:
    """With the folder's weights, or with random ones."""
    if source.is_dir() and (list(source.glob("*.safetensors")) or list(source.glob("pytorch_model*.bin"))):
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(0)
    with deepspeed.zero.Init(enabled=not plain):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))


def tokens_of(text: Path, source: Path, vocabulary: int) -> torch.Tensor:
    """[tokens] of a text file.

    Raises:
        SystemExit: the model has no embedding for some token.
    """
    if source.is_dir() and list(source.glob("tokenizer*")):
        tokens = torch.tensor(AutoTokenizer.from_pretrained(source)(text.read_text())["input_ids"])
    else:
        tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    if tokens.max() >= vocabulary:
        raise SystemExit(
            f"error: {text} has token {tokens.max()}, and the model's vocabulary ends at {vocabulary - 1}."
        )
    return tokens


def samples(tokens: torch.Tensor, length: int, engine: Any) -> Iterator[tuple[torch.Tensor]]:
    """Each process's own micro-batches without end, the same after a resume."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for number in count(engine.global_steps * engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(number * world + rank)
        size = (engine.train_micro_batch_size_per_gpu(), 1)
        starts = torch.randint(len(tokens) - length, size, generator=generator)
        yield (tokens[starts + torch.arange(length)],)


def main() -> None:
    """Train, report, save."""
    parser = make_parser(__doc__, "ds_zero3_offload.json")
    parser.add_argument("--model-name", type=Path, required=True, metavar="DIR_OR_CONFIG")
    parser.add_argument("--text", type=Path, default=Path(__file__), metavar="FILE", help="default: this program")
    parser.add_argument("--seq-length", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="a checkpoint at the end; goes on from one")
    args = parser.parse_args()
    if args.plain and args.save is not None:
        parser.error("--plain saves no checkpoint: leave --save out")
    model = make_model(args.model_name, plain=args.plain)
    tokens = tokens_of(args.text, args.model_name, model.config.vocab_size)
    if len(tokens) <= args.seq_length:
        raise SystemExit(f"error: {args.text} has {len(tokens)} tokens, no more than --seq-length {args.seq_length}.")
    engine, _ = initialize(args, model, read_config(args), None)
    if args.save is not None:
        engine.load_checkpoint(args.save)
    first, batches = engine.global_steps, samples(tokens, args.seq_length, engine)
    for step in range(first, args.steps):
        report(step, train_step(engine, batches, lambda ids: engine(input_ids=ids, labels=ids).loss))
    if args.save is not None and engine.global_steps > first:
        engine.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
