"""``gptpar fit``: choose a model's sequence length, batch, number format and number of steps for the machine at hand.

Prints flags for ``gptpar pretrain`` on stdout, one a line, and every choice with its reason on stderr.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from typing import cast

import torch

from gptpar.command import Parser, positive_float, positive_int
from gptpar.config import Config
from gptpar.config.derive import derive, padded_vocab
from gptpar.config.presets import PRESETS
from gptpar.errors import GptparError
from gptpar.host import available_memory
from gptpar.model.flops import Shape, flops_per_token, peak_flops
from gptpar.plan.job import Job
from gptpar.plan.memory import stage_memory
from gptpar.reporting.banner import format_bytes
from gptpar.reporting.console import format_duration
from gptpar.topology import Layout

GPU_SHARE_OF_PEAK = 0.35
"""Assumed share of a GPU's peak that training reaches; only the number of steps depends on it."""
CPU_SHARE_OF_MATMUL = 0.65
"""Training's speed on a CPU as a share of a large matrix product's (optimizer, softmax and norms included)."""


@dataclass(frozen=True)
class Machine:
    """What the choice depends on.

    Attributes:
        memory: bytes free for a process: on the GPU, or in the host.
        flops: expected training speed of the whole machine in FLOP/s.
    """

    num_gpus: int
    precision: str
    memory: int
    flops: float
    description: str


@dataclass(frozen=True)
class Choice:
    """One flag's value and why."""

    flag: str
    value: str
    reason: str


def matmul_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a matrix product of a 350M model's MLP on the CPU, the best of a few tries."""
    a, b = torch.randn(1024, 1024).to(dtype), torch.randn(4096, 1024).to(dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b.t())
        best = min(best, time.perf_counter() - start)
    return 2 * 1024 * 1024 * 4096 / best


def this_machine() -> Machine:
    """Look at the GPUs, or time matrix products on the CPU."""
    count = torch.cuda.device_count()
    if count:
        properties = torch.cuda.get_device_properties(0)
        precision = "bf16" if properties.major >= 8 else "fp16"
        peak = peak_flops(properties.name, precision) or 100e12
        text = f"{count} x {properties.name}"
        return Machine(count, precision, properties.total_memory, GPU_SHARE_OF_PEAK * peak * count, text)
    fp32, bf16 = matmul_rate(torch.float32), matmul_rate(torch.bfloat16)
    precision, rate = ("bf16", bf16) if bf16 > 1.3 * fp32 else ("fp32", fp32)
    text = f"no GPU; matrix products reach {bf16 / 1e9:.0f} GFLOP/s in bf16 and {fp32 / 1e9:.0f} in fp32"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(0, precision, max(free, available_memory()), CPU_SHARE_OF_MATMUL * rate, text)


def vocabulary_for(machine: Machine) -> Choice:
    """A small vocabulary where steps are few: every piece must be seen often to be learnt."""
    if machine.num_gpus:
        return Choice("vocab-size", "8192", "a corpus of a few million words fills this many pieces")
    return Choice("vocab-size", "1024", "few steps fit the time, so each piece must be seen often")


def choose(machine: Machine, preset: str, vocab_size: int, minutes: float) -> list[Choice]:
    """Flags that make a preset train for about ``minutes`` on a machine.

    Raises:
        GptparError: the model does not fit into the memory even with the smallest batch.
    """
    seq_length, largest = (1024, 16) if machine.num_gpus else (128, 4)
    where = "the GPU" if machine.num_gpus else "the host"
    micro = largest
    while (need := memory_needed(preset, seq_length, vocab_size, micro, machine)) > 0.9 * machine.memory:
        micro //= 2
        if not micro:
            raise GptparError(
                f"the {preset} model needs {format_bytes(need)} to train even with one sample of {seq_length} tokens, "
                f"and {where} has {format_bytes(machine.memory)} free: choose a smaller --preset."
            )
    batch = max(micro * max(1, machine.num_gpus), largest)
    tokens = batch * seq_length
    seconds = tokens * flops_per_token(shape_of(preset, seq_length, vocab_size), causal=False) / machine.flops
    few, many = (200, 1000) if machine.num_gpus else (60, 240)
    steps = min(many, max(few, int(minutes * 60 / seconds)))
    length = f"about {format_duration(steps * seconds)} at an expected {seconds:.2f} s a step"
    return [
        Choice(
            "seq-length",
            str(seq_length),
            "GPT-2's" if machine.num_gpus else "many small steps learn more in little time",
        ),
        Choice(
            "micro-batch-size", str(micro), f"needs {format_bytes(need)} of {format_bytes(machine.memory)} on {where}"
        ),
        Choice("global-batch-size", str(batch), f"{tokens:,} tokens a step"),
        Choice("train-iters", str(steps), length),
        Choice("lr-warmup-fraction", "0.1", "a tenth of the run"),
        Choice("log-interval", "1" if not machine.num_gpus else "10", "a line every few seconds"),
        *(
            [Choice(machine.precision, "", f"the fastest number format here ({machine.description})")]
            * (machine.precision != "fp32")
        ),
    ]


def config_of(preset: str, seq_length: int, vocab_size: int) -> Config:
    """A preset with another length and vocabulary."""
    config, _ = derive(Config().update("model", preset=preset, seq_length=seq_length), 1)
    multiple = config.model.make_vocab_size_divisible_by
    return config.update("model", padded_vocab_size=padded_vocab(vocab_size, multiple))


def shape_of(preset: str, seq_length: int, vocab_size: int) -> Shape:
    """The shape of that."""
    return cast(Shape, config_of(preset, seq_length, vocab_size).model)


def memory_needed(preset: str, seq_length: int, vocab_size: int, micro_batch_size: int, machine: Machine) -> int:
    """Bytes one process is expected to need."""
    config = config_of(preset, seq_length, vocab_size)
    config = config.update("batch", micro_batch_size=micro_batch_size, global_batch_size=micro_batch_size)
    config = config.update("model", attention_dropout=0.0, hidden_dropout=0.0)
    if machine.precision != "fp32":
        config = config.update("precision", **{machine.precision: True})
    return round(stage_memory(Job(config, Layout(), "cuda" if machine.num_gpus else "cpu"), 0).allocated)


def make_parser() -> argparse.ArgumentParser:
    """The verb's flags."""
    parser = Parser(prog="gptpar fit", description=__doc__.replace("``", ""))
    parser.add_argument("--preset", default="350M", choices=tuple(PRESETS), help="the model")
    parser.add_argument("--minutes", type=positive_float, default=5.5, metavar="X", help="training time to aim at")
    parser.add_argument(
        "--vocab-size", type=positive_int, metavar="N", help="vocabulary of the data, if it exists already"
    )
    parser.add_argument("--only-vocab-size", action="store_true", help="print the vocabulary to make, and nothing else")
    return parser


def main(argv: list[str]) -> int:
    """Print flags on stdout and reasons on stderr."""
    args = make_parser().parse_args(argv)
    machine = this_machine()
    vocabulary = vocabulary_for(machine)
    if args.only_vocab_size:
        print(vocabulary.value)
        return 0
    choices = choose(machine, args.preset, args.vocab_size or int(vocabulary.value), args.minutes)
    print(f"fitted to this machine: {machine.description}", file=sys.stderr)
    for choice in choices:
        print(f"  --{choice.flag} {choice.value}".ljust(28) + choice.reason, file=sys.stderr)
        print(f"--{choice.flag}" + (f"\n{choice.value}" if choice.value else ""))
    return 0
