"""Trains a small GPT on one text file, in the mode you name; the last line is a JSON object of what was measured.

python examples/gpt_lite/train.py --mode zero3 --text my.txt
torchrun --nproc-per-node 2 examples/gpt_lite/train.py --mode pipeline --text my.txt
python examples/gpt_lite/compare.py --text my.txt    # all modes in turn, and a table

A mode is a few lines of the configuration; the model and the data stay the same. The mode "plain" is PyTorch without
gptpar, in one process and fp32. The exit code is 3 where the GPU's memory did not suffice.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Generator, Iterator
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
PLAIN = "plain"
SAMPLES_PER_STEP, MICRO_BATCH = 16, 4
RATE, DECAY, CLIP, WARM_UP = 1e-3, 0.1, 1.0, 10
UNTIMED_STEPS = 3
OUT_OF_MEMORY = 3


def config_of(mode: str, world: int, *, fp32: bool = False) -> dict[str, Any]:
    """The configuration of a mode; a step has the same samples in each. A GPU computes in bf16 if not in fp32."""
    stages = MODES[mode].get("pipeline", {}).get("stages", 1)
    return {
        "train_batch_size": SAMPLES_PER_STEP,
        "train_micro_batch_size_per_gpu": min(MICRO_BATCH, SAMPLES_PER_STEP * stages // world),
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": DECAY}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": WARM_UP}},
        "gradient_clipping": CLIP,
        "bf16": {"enabled": torch.cuda.is_available() and not fp32},
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


def plain(sizes: Sizes, text: torch.Tensor) -> Generator[float]:
    """The loss of each step of PyTorch alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, count = Gpt(sizes).to(device), SAMPLES_PER_STEP // MICRO_BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    # DeepSpeed's WarmupLR, which is one step behind
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, math.log(max(1, n), WARM_UP)))
    data = micro_batches(text, sizes, (0, 1, count, MICRO_BATCH))
    while True:
        loss = torch.zeros((), device=device)
        for _ in range(count):
            part = model(*(tensor.to(device) for tensor in next(data))) / count
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad()
        yield loss.item()


def with_engine(args: argparse.Namespace, sizes: Sizes, text: torch.Tensor) -> Generator[float]:
    """The loss of each step of a mode."""
    config = config_of(args.mode, int(os.environ.get("WORLD_SIZE", 1)), fp32=args.fp32)
    torch.manual_seed(0)
    if "pipeline" in config:
        engine, *_ = gptpar.initialize(model=layers(sizes), loss_fn=loss_fn, config=config)
    else:
        model, take_loss = Gpt(sizes), lambda loss, batch: loss
        engine, *_ = gptpar.initialize(model=model, loss_fn=take_loss, config=config)
    layout = engine.topology.mesh
    count, samples = engine.gradient_accumulation_steps(), engine.train_micro_batch_size_per_gpu()
    data = micro_batches(text, sizes, (engine.topology.rank // layout.pipeline, layout.data, count, samples))
    try:
        while True:
            yield engine.train_batch(data).item()
    finally:
        engine.close()


def train(args: argparse.Namespace) -> dict[str, Any]:
    """What was measured."""
    sizes, cuda = SIZES[args.size], torch.cuda.is_available()
    if cuda and args.gpu_memory_gib is not None:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.gpu_memory_gib * 2**30 / whole))
    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    losses: list[float] = []
    seconds: list[float] = []
    steps = plain(sizes, text) if args.mode == PLAIN else with_engine(args, sizes, text)
    out_of_memory = False
    try:
        for step in range(args.steps):
            begun = time.perf_counter()
            losses.append(next(steps))
            seconds.append(time.perf_counter() - begun)
            if int(os.environ.get("RANK", 0)) == 0 and (step + 1) % 10 == 0:
                print(f"{args.mode}: step {step + 1}, loss {losses[-1]:.4f}", flush=True)
    except torch.OutOfMemoryError:
        out_of_memory = True
    steps.close()
    return {
        "mode": args.mode,
        "processes": int(os.environ.get("WORLD_SIZE", 1)),
        "out_of_memory": out_of_memory,
        "losses": losses,
        "gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "tokens_per_s": SAMPLES_PER_STEP
        * sizes.length
        / statistics.median(seconds[UNTIMED_STEPS:] or seconds or [math.inf]),
    }


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=(PLAIN, *MODES), required=True)
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="any file; a byte is a token")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--fp32", action="store_true", help="on a GPU, too, where all modes but plain compute in bf16")
    parser.add_argument("--gpu-memory-gib", type=float, metavar="GIB", help="no more of a GPU's memory than this")
    return parser


if __name__ == "__main__":
    measured = train(parser().parse_args())
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(measured), flush=True)
    sys.exit(OUT_OF_MEMORY if measured["out_of_memory"] else 0)
