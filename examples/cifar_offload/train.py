"""Trains a CNN on CIFAR-10, in plain PyTorch or with ZeRO-3 and everything in host memory.

python examples/cifar_offload/train.py --engine plain --gpu-memory-gib 4     # out of memory
python examples/cifar_offload/train.py --engine gptpar --gpu-memory-gib 4    # trains
python examples/cifar_offload/compare.py                                     # both, and a report

--data takes the folder of CIFAR-10's binary version (data_batch_1.bin ... data_batch_5.bin). Without it, images are
made on the spot: ten patterns under noise. The last line is a JSON object of what was measured; the exit code is 3
where the GPU's memory did not suffice.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gptpar

CONFIG = Path(__file__).with_name("ds_config.json")
OUT_OF_MEMORY = 3
CLASSES, PIXELS, RECORD = 10, 32, 1 + 3 * 32 * 32
"""CIFAR-10's binary version: each image is a byte for its class, then 1,024 bytes each of red, green and blue."""


class Block(nn.Module):
    """Two convolutions around a residual; [samples, width, 8, 8] both ways."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))


class Cnn(nn.Module):
    """[samples, 3, 32, 32] -> [samples, 10]; a block has 18 width^2 parameters."""

    def __init__(self, width: int, num_blocks: int):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def cifar(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(images uint8 [count, 3, 32, 32], classes [count]) of the binary version's training files.

    Raises:
        SystemExit: the folder has none, or one is cut off.
    """
    files = sorted(folder.glob("data_batch_*.bin"))
    wrong = [file.name for file in files if file.stat().st_size % RECORD or not file.stat().st_size]
    if not files or wrong:
        what = f"{', '.join(wrong)} is not a multiple of {RECORD} bytes" if wrong else "no data_batch_*.bin is there"
        raise SystemExit(f"error: {folder}: {what}; --data takes the folder of CIFAR-10's binary version.")
    bytes_ = torch.cat([torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in files])
    records = bytes_.view(-1, RECORD)
    return records[:, 1:].reshape(-1, 3, PIXELS, PIXELS), records[:, 0].long()


def made_images(count: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, made: a random pattern for each class, under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(256, (CLASSES, 3, PIXELS, PIXELS), generator=generator)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randint(256, (count, 3, PIXELS, PIXELS), generator=generator)
    return ((patterns[classes] + noise) // 2).to(torch.uint8), classes


Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plain_step(model: nn.Module, config: dict[str, Any], device: torch.device) -> Step:
    """A step in plain PyTorch, all of it on the device."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])

    def step(images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(images), classes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def gptpar_step(model: nn.Module, config: dict[str, Any], device: torch.device) -> Step:
    """The same step by gptpar, as the configuration says."""
    engine, *_ = gptpar.initialize(model=model, config=config)

    def step(images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(engine(images), classes)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def train(args: argparse.Namespace) -> dict[str, Any]:
    """What was measured; ``losses`` ends where memory did not suffice."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    if cuda:
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False  # to compare two engines
        if args.gpu_memory_gib is not None:
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, args.gpu_memory_gib * 2**30 / whole), device)
    config = json.loads(CONFIG.read_text()) | {"train_micro_batch_size_per_gpu": args.batch_size}
    all_images, all_classes = made_images() if args.data is None else cifar(args.data)
    torch.manual_seed(0)
    model = Cnn(args.width, args.num_blocks)
    parameters = sum(p.numel() for p in model.parameters())
    losses: list[float] = []
    out_of_memory, begun = False, time.perf_counter()
    try:
        step = (plain_step if args.engine == "plain" else gptpar_step)(model, config, device)
        for number in range(args.steps):
            chosen = torch.randint(len(all_images), (args.batch_size,), generator=torch.Generator().manual_seed(number))
            images = all_images[chosen].to(device).float() / 127.5 - 1
            losses.append(step(images, all_classes[chosen].to(device)).item())
    except torch.OutOfMemoryError as error:
        out_of_memory = True
        print(f"out of memory after {len(losses)} steps: {str(error).splitlines()[0]}", flush=True)
    return {
        "engine": args.engine,
        "parameters": parameters,
        "state_bytes": 16 * parameters,
        "allowed_gib": args.gpu_memory_gib if cuda else None,
        "peak_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "out_of_memory": out_of_memory,
        "losses": losses,
        "seconds": time.perf_counter() - begun,
    }


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a run, in whichever engine and memory."""
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="of CIFAR-10's binary version")
    parser.add_argument("--width", type=int, default=2048, help="channels (default: %(default)s)")
    parser.add_argument("--num-blocks", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("plain", "gptpar"), required=True)
    parser.add_argument("--gpu-memory-gib", type=float, metavar="GIB", help="no more of the GPU's memory than this")
    add_run_flags(parser)
    return parser


if __name__ == "__main__":
    measured = train(parser().parse_args())
    print(json.dumps(measured), flush=True)
    sys.exit(OUT_OF_MEMORY if measured["out_of_memory"] else 0)
