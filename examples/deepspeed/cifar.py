"""Trains a CNN on CIFAR-10 with ZeRO-3 and everything in host memory.

gptpar launch --bind_cores_to_rank cifar.py --deepspeed
gptpar launch --num_gpus 1 cifar.py --data cifar-10-batches-bin

--data takes the folder of CIFAR-10's binary version (data_batch_1.bin ... data_batch_5.bin). Without it, images are
made on the spot: ten patterns under noise.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gptpar.deepspeed as deepspeed
from common import initialize, make_parser, read_config, report, train_step

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
    """[samples, 3, 32, 32] bytes -> [samples, 10]; a block has 18 width^2 parameters."""

    def __init__(self, width: int, num_blocks: int):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(num_blocks)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images.float() / 127.5 - 1)).mean((2, 3)))


def cifar(folder: Path) -> TensorDataset:
    """(image uint8 [3, 32, 32], class) of the binary version's training files.

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
    return TensorDataset(records[:, 1:].reshape(-1, 3, PIXELS, PIXELS), records[:, 0].long())


def made_images(count: int = 2048) -> TensorDataset:
    """The same, made: a random pattern for each class, under noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(256, (CLASSES, 3, PIXELS, PIXELS), generator=generator)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    noise = torch.randint(256, (count, 3, PIXELS, PIXELS), generator=generator)
    return TensorDataset(((patterns[classes] + noise) // 2).to(torch.uint8), classes)


def main() -> None:
    """Train."""
    parser = make_parser(__doc__, "cifar.json")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="of CIFAR-10's binary version")
    parser.add_argument("--width", type=int, default=2048, help="channels (default: %(default)s)")
    parser.add_argument("--num-blocks", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    data = made_images() if args.data is None else cifar(args.data)
    torch.manual_seed(0)
    with deepspeed.zero.Init(enabled=not args.plain):
        model = Cnn(args.width, args.num_blocks)
    engine, batches = initialize(args, model, read_config(args), data)
    for step in range(args.steps):
        report(step, train_step(engine, batches, lambda images, classes: F.cross_entropy(engine(images), classes)))


if __name__ == "__main__":
    main()
