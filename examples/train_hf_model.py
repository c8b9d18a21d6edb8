"""Trains an unmodified transformers model with ZeRO-3, its parameters and optimizer in host memory.

python examples/train_hf_model.py --model-name FOLDER --steps 100 --text my.txt
torchrun --nproc-per-node 4 examples/train_hf_model.py --model-name config.json --steps 100 --text my.txt
sbatch examples/train_hf_model.sbatch --model-name FOLDER --steps 100 --text my.txt

FOLDER holds a model as transformers saves it. With its weights, training goes on from them; with a config.json alone
(or its path), the model begins at random, and no process ever holds all of it. Tokens are those of the folder's
tokenizer, or the text's bytes where it has none. --config names another DeepSpeed JSON. The same command goes on from
--save, if it holds a checkpoint.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import gptpar
from gptpar.system.command_line import needed_packages

with needed_packages():
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

CONFIG = Path(__file__).with_name("hf_zero3_offload.json")
REPORT_EVERY = 10


def make_model(source: Path) -> tuple[PreTrainedModel, Any | None]:
    """The model, and how to build its values where they were not read from a folder."""
    if source.is_dir() and (list(source.glob("*.safetensors")) or list(source.glob("pytorch_model*.bin"))):
        return AutoModelForCausalLM.from_pretrained(source), None
    config = AutoConfig.from_pretrained(source)
    with gptpar.deferred_init(seed=0) as recording:
        model = AutoModelForCausalLM.from_config(config)
    return model, recording


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


def main() -> None:
    """Train, report, save."""
    args = parser().parse_args()
    if args.gpu_memory_gib is not None and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.gpu_memory_gib * 2**30 / whole))
    model, recording = make_model(args.model_name)
    tokens = tokens_of(args.text, args.model_name, model.config.vocab_size)
    if len(tokens) <= args.seq_length:
        raise SystemExit(f"error: {args.text} has {len(tokens)} tokens, no more than --seq-length {args.seq_length}.")
    engine, *_ = gptpar.initialize(model=model, config=args.config, recording=recording)
    rank, world = engine.topology.rank, engine.topology.mesh.world_size
    if args.save is not None:
        engine.load_checkpoint(args.save)
    samples, count = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    begun, first = time.perf_counter(), engine.global_steps
    for step in range(first, args.steps):
        for number in range(count):
            seed = (step * count + number) * world + rank  # each process its own samples, the same after a resume
            generator = torch.Generator().manual_seed(seed)
            starts = torch.randint(len(tokens) - args.seq_length, (samples, 1), generator=generator)
            batch = tokens[starts + torch.arange(args.seq_length)].to(engine.device)
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
        if rank == 0 and ((step + 1) % REPORT_EVERY == 0 or step + 1 == args.steps):
            rate = (step + 1 - first) * count * samples * world * args.seq_length / (time.perf_counter() - begun)
            print(f"step {step + 1}: loss {loss.item():.4f}, {rate:,.0f} tokens/s", flush=True)
    if args.save is not None and engine.global_steps > first:
        engine.save_checkpoint(args.save)
    if rank == 0 and torch.cuda.is_available():
        print(f"GPU peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB", flush=True)
    engine.close()


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-name", type=Path, required=True, metavar="DIR_OR_CONFIG")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seq-length", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--config", type=Path, default=CONFIG, metavar="JSON", help="default: %(default)s")
    parser.add_argument("--gpu-memory-gib", type=float, metavar="GIB", help="no more of a GPU's memory than this")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="a checkpoint at the end; goes on from one")
    return parser


if __name__ == "__main__":
    main()
