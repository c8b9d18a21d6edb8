"""What these programs share: flags, DeepSpeed's ``initialize`` in plain PyTorch, and a step."""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
from collections.abc import Callable, Iterator
from itertools import chain, count, repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import gptpar.deepspeed as deepspeed

ORDER_SEED = 1234  # of training_data in gptpar


def make_parser(description: str | None, config: str) -> argparse.ArgumentParser:
    """A parser with the flags that all programs have; ``config`` is the file in this folder that they use."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the launcher")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--plain", action="store_true", help="plain PyTorch in fp32, without gptpar")
    parser.add_argument("--fp32", action="store_true", help="compute in fp32, even if the file enables bf16")
    parser.add_argument("--deepspeed-config", dest="deepspeed_config", help="the same as --deepspeed_config")
    deepspeed.add_config_arguments(parser).set_defaults(deepspeed_config=str(Path(__file__).with_name(config)))
    return parser


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The configuration file, changed by flags."""
    config = json.loads(Path(args.deepspeed_config).read_text())
    return config | {"bf16": {"enabled": False}} if args.fp32 else config


def initialize(args: argparse.Namespace, model: nn.Module, config: dict[str, Any], data: Dataset[Any] | None) -> Any:
    """(engine, micro-batches without end): DeepSpeed's ``initialize``, or the same calls in plain PyTorch."""
    if args.plain:
        engine: Any = PlainEngine(model, config)
        return engine, None if data is None else engine.batches(data)
    engine, _, loader, _ = deepspeed.initialize(model=model, training_data=data, config=config)
    return engine, None if loader is None else chain.from_iterable(repeat(loader))


class PlainEngine:
    """The engine's calls in plain PyTorch: AdamW in fp32, DistributedDataParallel over several processes.

    Args:
        model: any module.
        config: DeepSpeed's.
    """

    def __init__(self, model: nn.Module, config: dict[str, Any]):
        cuda, self.world = torch.cuda.is_available(), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
        self.module = self._forward = model.to(self.device)
        if self.world > 1:
            dist.init_process_group("nccl" if cuda else "gloo")
            atexit.register(dist.destroy_process_group)
            self._forward = DistributedDataParallel(model)
        self._micro_batch, self._clip = config["train_micro_batch_size_per_gpu"], config["gradient_clipping"]
        whole = self.world * self._micro_batch
        self._accumulation, self.global_steps, self._backwards = config.get("train_batch_size", whole) // whole, 0, 0
        self._optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["params"])
        warm_up = config.get("scheduler", {"params": {"warmup_num_steps": 0}})["params"]["warmup_num_steps"]
        # DeepSpeed's WarmupLR, which is one step behind
        rate = (lambda step: min(1.0, math.log(max(1, step), warm_up))) if warm_up else (lambda step: 1.0)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, rate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def train_micro_batch_size_per_gpu(self) -> int:
        return self._micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self._accumulation

    def batches(self, data: Dataset[Any]) -> Iterator[Any]:
        order = DistributedSampler(data, self.world, int(os.environ.get("RANK", 0)), seed=ORDER_SEED, drop_last=True)
        for epoch in count():
            order.set_epoch(epoch)
            yield from DataLoader(data, self._micro_batch, sampler=order, drop_last=True)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self._accumulation).backward()
        self._backwards += 1

    def step(self) -> None:
        if self._backwards % self._accumulation == 0:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._clip)
            self._optimizer.step()
            self._scheduler.step()
            self._optimizer.zero_grad()
            self.global_steps += 1


def train_step(engine: Any, batches: Iterator[Any], loss_of: Callable[..., torch.Tensor]) -> torch.Tensor:
    """One step of the optimizer: the mean loss of its samples on all processes."""
    mean = torch.zeros((), device=engine.device)
    for _ in range(engine.gradient_accumulation_steps()):
        loss = loss_of(*(tensor.to(engine.device) for tensor in next(batches)))
        engine.backward(loss)
        engine.step()
        mean += loss.detach() / engine.gradient_accumulation_steps()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean


def report(step: int, loss: torch.Tensor) -> None:
    """Print the loss of a step, on the first process."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"step {step + 1}: loss {loss.item():.9f}", flush=True)
