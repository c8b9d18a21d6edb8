"""Trains a GPT in one layout for check-layouts, and gathers whole tensors from its processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gptpar.checkpoint import load_checkpoint, save_checkpoint
from gptpar.cli.check_layouts.outcome import Outcome, Tensors
from gptpar.config import Config
from gptpar.data.loader import MicroBatch, make_micro_batch
from gptpar.optim.schedule import make_schedule
from gptpar.optim.skip_step import NOT_FINITE
from gptpar.run.saved_state import checkpoint_tensors
from gptpar.run.trainer import Trainer
from gptpar.topology.groups import Topology
from gptpar.topology.mesh import DATA
from gptpar.topology.tensor_parts import TensorParts

DOCUMENT_ENDS = 0.3
"""Probability that a token ends a document, where documents matter."""


class CaseRun:
    """One training in one layout; every process has one.

    Args:
        config: resolved, with the padded vocabulary.
    """

    def __init__(self, config: Config, topology: Topology):
        assert config.batch.train_samples is None
        self.config, self.topology = config, topology
        samples = (config.batch.train_iters or 0) * config.batch.global_batch_size
        self.trainer = Trainer(config, topology, make_schedule(config, samples))
        self.trainer.initialise()
        self.outcome = Outcome(initial=self._whole(self.trainer.engine.optimizer.parts("weights")))

    def train(self, first: int, last: int) -> None:
        """Take the steps ``first`` to ``last - 1``."""
        size = self.config.batch.global_batch_size
        for step in range(first, last):
            loss = self.trainer.forward_backward(self._batches(step), step)
            optimizer = self.trainer.engine.optimizer
            self.outcome.gradients.append(self._whole(optimizer.parts("grad")))
            launched = self.trainer.update(
                loss, iteration=step + 1, samples=size, progress=float(step * size + size), stop=False
            )
            mean, norm, skipped, _, *auxiliary = launched.readings.read()
            layers = [norm for kind in launched.layer_norms.values() for _, norm in sorted(kind.items())]
            # The norm of an outlier is compared, too; the weights show whether it was skipped.
            shown = float("nan") if skipped == NOT_FINITE else norm
            self.outcome.steps.append((mean, shown, *auxiliary, *layers))
            weights = self._whole(optimizer.parts("weights"))
            self.outcome.weights.append(weights | self.trainer.experts.tensors() if weights else weights)

    def save(self, folder: Path, iteration: int) -> None:
        """Write a checkpoint."""
        tensors = checkpoint_tensors(self.trainer)
        window = self.trainer.skip_step
        meta = {
            "optimizer_steps": self.trainer.engine.optimizer.steps_taken,
            "skip_step": None if window is None else window.state(),
            "experts": self.trainer.experts.state(),
        }
        save_checkpoint(folder, iteration, tensors, meta)

    def resume(self, folder: Path) -> None:
        """Load a checkpoint, which any layout may have saved."""
        loaded = load_checkpoint(folder, checkpoint_tensors(self.trainer))
        self.trainer.engine.optimizer.steps_taken = loaded.meta["optimizer_steps"]
        self.trainer.experts.load(loaded.meta["experts"])
        if self.trainer.skip_step is not None:
            self.trainer.skip_step.load(loaded.meta["skip_step"])
        self.trainer.engine.publish()

    def _batches(self, step: int) -> list[MicroBatch]:
        """This process's micro-batches: number j of data rank r is number ``j * dp + r`` of the global batch."""
        model, batch, dp = self.config.model, self.config.batch, self.topology.mesh.data
        generator = torch.Generator().manual_seed(step)
        shape = (batch.global_batch_size, model.seq_length + 1)
        tokens = torch.randint(0, self.config.tokenizer.vocab_size or 2, shape, generator=generator)
        data, eod = self.config.data, int(tokens.max())
        rules = {name: getattr(data, name) for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")}
        if any(rules.values()):  # documents down to one token
            tokens[torch.rand(shape, generator=generator) < DOCUMENT_ENDS] = eod
        mine = tokens.split(batch.micro_batch_size)[self.topology.position(DATA) :: dp]
        return [make_micro_batch(part.numpy(), eod=eod, **rules) for part in mine]

    def _whole(self, held: Mapping[str, TensorParts]) -> Tensors:
        """Whole tensors of all processes' boxes, on the main process; empty on the others."""
        boxes = [(name, whole, offsets, part) for name, whole in held.items() for offsets, part in whole.parts]
        places = [(name, whole.shape, offsets, part.shape, part.dtype) for name, whole, offsets, part in boxes]
        # One message: to pickle each tensor takes longer than a step.
        mine = places, torch.cat([torch.empty(0), *(part.flatten().cpu() for *_, part in boxes)])
        gathered: list[Any] = [mine]
        if self.topology.mesh.world_size > 1:
            gathered *= self.topology.mesh.world_size
            dist.gather_object(mine, gathered if self.topology.is_main else None)
        found: Tensors = {}
        for places, values in gathered if self.topology.is_main else ():
            parts = values.split([size.numel() for *_, size, _ in places])
            for (name, shape, offsets, size, dtype), part in zip(places, parts, strict=True):
                if name not in found:
                    found[name] = torch.full(shape, float("nan"), dtype=dtype)
                found[name][tuple(slice(o, o + n) for o, n in zip(offsets, size, strict=True))] = part.view(size)
        return found
