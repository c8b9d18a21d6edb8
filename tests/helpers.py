"""Small models and configurations for tests."""

from typing import Any

import torch

from gptpar.config import Config
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.optim.schedule import make_schedule
from gptpar.pipeline.stage import Stage
from gptpar.run.batch_plan import BatchPlan
from gptpar.run.trainer import Trainer
from gptpar.topology.groups import make_topology
from gptpar.topology.initial_values import Init
from gptpar.topology.mesh import Mesh

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 20 "
    "--lr 1e-2 --mock-data --vocab-size 60 --make-vocab-size-divisible-by 64 --attention-dropout 0 --hidden-dropout 0 "
    "--eval-iters 0"
)


def tiny_config(flags: str = "", world_size: int = 1) -> Config:
    """The tiny model with further flags, resolved, its vocabulary padded to 64 unless they say another number."""
    config, _ = resolve(parse_flags(f"{TINY} {flags}".split()), world_size)
    return config.update("model", padded_vocab_size=config.model.pad_vocab_size_to or 64)


def make_trainer(config: Config, rank: int = 0, mesh: Mesh = Mesh()) -> Trainer:  # noqa: B008
    """A trainer on the CPU with initial weights; with a layout of several processes, every one of them calls it."""
    topology = make_topology(mesh, rank, torch.device("cpu"))
    trainer = Trainer(config, topology, make_schedule(config, BatchPlan.of(config.batch).train_samples))
    trainer.initialise()
    return trainer


def every_field(stored: dict[str, dict[str, Any]]) -> set[str]:
    """The fields of a configuration as checkpoints hold it, as ``section.field``."""
    return {f"{section}.{name}" for section, fields in stored.items() for name in fields}


def random_tokens(samples: int, length: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """int64 [samples, length + 1]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (samples, length + 1), generator=generator)


def inits_of_stage(stage: Stage) -> dict[str, Init]:
    """Global name -> how the parameter is initialised."""
    return {name: info.init for name, info in stage.infos().items()}
