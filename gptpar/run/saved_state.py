"""Lists the contents of a GPT run's checkpoint: tensors by name, and facts about the run for ``stored_run``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import torch

from gptpar.engine.master_optimizer import Only
from gptpar.run.accept import Inputs
from gptpar.run.progress import Progress
from gptpar.run.trainer import Trainer
from gptpar.topology.tensor_parts import TensorParts, joined, named

RNG_RULE = "dropout is a hash of (seed, iteration, place of the micro-batch, layer, kind, global token or head)"


def checkpoint_tensors(
    trainer: Trainer, *, weights_only: bool = False, only: Only | None = None
) -> dict[str, TensorParts]:
    """Views of the live state by global name: ``weights/NAME``, and ``STATE/NAME`` for each state of the optimizer.

    Args:
        weights_only: leave out the states.
        only: see :meth:`~gptpar.engine.master_optimizer.MasterOptimizer.state_tensors`.
    """
    return named(trainer.engine.optimizer.state_tensors(only, ("weights",) if weights_only else None))


def tensors_to_save(trainer: Trainer, only: Only | None = None) -> dict[str, TensorParts]:
    """A checkpoint's tensors in the order in which steps overwrite them: all of one parameter, then the next.

    Args:
        only: see :meth:`~gptpar.engine.master_optimizer.MasterOptimizer.state_tensors`.
    """
    return joined(checkpoint_tensors(trainer, weights_only=trainer.config.checkpoint.no_save_optim, only=only), {})


def kinds_to_save(trainer: Trainer) -> Collection[str]:
    """The kinds of tensors in a checkpoint of the run: ``weights``, and the optimizer's states if these are saved."""
    return ("weights",) if trainer.config.checkpoint.no_save_optim else trainer.engine.optimizer.vectors.keys()


def meta_of(trainer: Trainer, progress: Progress, inputs: Inputs) -> dict[str, Any]:
    """Facts about the run, which a checkpoint keeps beside the tensors; ``stored_run`` reads them."""
    return {
        "progress": dataclasses.asdict(progress),
        "optimizer_steps": trainer.engine.optimizer.steps_taken,
        "loss_scale": trainer.loss_scale.state(),
        "schedule": dataclasses.asdict(trainer.schedule),
        "rng": {"seed": trainer.config.data.seed, "rule": RNG_RULE},
        "tokenizer": inputs.tokenizer,
        "corpora": inputs.corpora,
        "data_order": inputs.data_order,
        "config": trainer.config.to_dict(),
        "torch": torch.__version__,
        **({} if trainer.skip_step is None else {"skip_step": trainer.skip_step.state()}),
        **({} if (experts := trainer.experts.state()) is None else {"experts": experts}),
    }
