"""Trains a small GPT on one text file, in the mode you name; the last line is a JSON object of what was measured.

python examples/gpt_lite/train.py --mode zero3 --text my.txt
torchrun --nproc-per-node 2 examples/gpt_lite/train.py --mode pipeline --text my.txt
python examples/gpt_lite/compare.py --text my.txt    # all modes in turn, and a table

A mode is a few lines of the configuration; the model and the loop stay the same.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from model import SIZES, Gpt, Sizes, layers, loss_fn

import gptpar

HOST = {"device": "cpu"}
MODES: dict[str, dict[str, Any]] = {
    "dp": {"zero_optimization": {"stage": 0}},
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero2": {"zero_optimization": {"stage": 2}},
    "zero3": {"zero_optimization": {"stage": 3}},
    "offload": {"zero_optimization": {"stage": 3, "offload_optimizer": HOST, "offload_param": HOST}},
    "pipeline": {"zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}},
}
SAMPLES_PER_STEP, MICRO_BATCH = 16, 4
WARM_UP_STEPS = 3  # not timed


def config_of(mode: str, world: int) -> dict[str, Any]:
    """The configuration of a mode; a step has the same samples in each."""
    stages = MODES[mode].get("pipeline", {}).get("stages", 1)
    return {
        "train_batch_size": SAMPLES_PER_STEP,
        "train_micro_batch_size_per_gpu": min(MICRO_BATCH, SAMPLES_PER_STEP * stages // world),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": torch.cuda.is_available()},
        **MODES[mode],
    }


def micro_batches(text: torch.Tensor, sizes: Sizes, shape: tuple[int, int, int, int]) -> Iterator[Any]:
    """(inputs, labels) without end; together the processes of a step read the same samples, however many they are.

    Args:
        text: [bytes] of the file.
        shape: this data-parallel process's number, how many there are, micro-batches a step, samples of one.
    """
    rank, world, count, samples = shape
    step = 0
    while True:
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - sizes.length, (SAMPLES_PER_STEP, 1), generator=generator)
        tokens = text[starts + torch.arange(sizes.length + 1)].long()
        mine = tokens.view(count, world, samples, -1)[:, rank]
        yield from ((batch[:, :-1].contiguous(), batch[:, 1:].contiguous()) for batch in mine)
        step += 1


def train(args: argparse.Namespace) -> dict[str, Any]:
    """What was measured."""
    sizes, world = SIZES[args.size], int(os.environ.get("WORLD_SIZE", 1))
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    config = config_of(args.mode, world)
    torch.manual_seed(0)
    if "pipeline" in config:
        engine, *_ = gptpar.initialize(model=layers(sizes), loss_fn=loss_fn, config=config)
    else:
        model, take_loss = Gpt(sizes), lambda loss, batch: loss
        engine, *_ = gptpar.initialize(model=model, loss_fn=take_loss, config=config)
    layout = engine.topology.layout
    count, samples = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    data = micro_batches(text, sizes, (engine.topology.rank // layout.pipeline, layout.data, count, samples))
    losses, seconds = [], []
    for step in range(args.steps):
        begun = time.perf_counter()
        losses.append(engine.train_batch(data).item())
        seconds.append(time.perf_counter() - begun)
        if engine.topology.rank == 0 and (step + 1) % 10 == 0:
            print(f"{args.mode}: step {step + 1}, loss {losses[-1]:.4f}", flush=True)
    parameters = sum(p.numel() for p in Gpt(sizes).parameters())
    engine.close()
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
    tokens = SAMPLES_PER_STEP * sizes.length
    return {
        "mode": args.mode,
        "processes": world,
        "parameters": parameters,
        "losses": losses,
        "gpu_bytes": on_gpu,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "tokens_per_s": tokens / statistics.median(seconds[WARM_UP_STEPS:] or seconds),
    }


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="any file; a byte is a token")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=30)
    return parser


if __name__ == "__main__":
    measured = train(parser().parse_args())
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(measured), flush=True)
