"""Plans of a few models, and a process group that does nothing."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from gptpar.cli.plan import make_planner
from gptpar.plan.job import Job
from gptpar.plan.planner import Plan, Planner

GIB = 2**30
CALM = "--bf16 --attention-dropout 0 --hidden-dropout 0 "
SMALL = CALM + "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 "


def planner_of(flags: str) -> Planner:
    return make_planner(flags.split())[0]


def plan(flags: str) -> Plan:
    return planner_of(flags).plan()


def block_bytes(job: Job, number: int = 0) -> float:
    """Bytes that a block keeps of a token."""
    return job.costs[job.blocks(job.stages[0])[number]].kept


@contextmanager
def pretended_world(rank: int, size: int) -> Iterator[None]:
    """A process group of which only this process exists; its collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


OFFLOAD = "--cpu-optimizer --cpu-optimizer-ratio "
TEN_B = CALM + (
    "--num-layers 50 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --micro-batch-size 10 "
    "--recompute-granularity full "
)
