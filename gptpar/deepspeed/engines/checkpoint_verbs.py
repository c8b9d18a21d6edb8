"""DeepSpeed's verbs of an engine's checkpoints, and the save that is under way while training goes on."""

from __future__ import annotations

import os
import warnings
from typing import Any

from gptpar.deepspeed.engines import checkpoint
from gptpar.deepspeed.engines.engine_state import EngineState, StepGradient
from gptpar.deepspeed.engines.stored_state import Chosen, UsersPart
from gptpar.errors import ArgumentError, CheckpointError, wrong_type


class CheckpointVerbs(EngineState):
    """Saves and loads between two steps; with ``"async_save": true`` a save goes on behind the steps that follow."""

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> str:
        """Keep the module's and the engine's state after the last step; all processes call it.

        No checkpoint holds gradients. A save amid a step leaves out those of its complete micro-batches, says so,
        and the step goes on. Between a step's last backward pass and the step, a save is refused.

        With the key ``"async_save": true`` in the configuration's section ``"gptpar"`` it returns when the state of
        this moment is safe from the steps that follow. The files are whole when the next save, load, :meth:`close` or
        :meth:`wait_for_checkpoint` returns, or the process has ended.

        See :func:`gptpar.deepspeed.engines.checkpoint.save` for the result and the errors, and
        :class:`~gptpar.deepspeed.engines.stored_state.UsersPart` for ``client_state``. ``exclude_frozen_parameters``
        leaves out frozen weights; a load with ``load_module_strict=False`` then leaves alone those of the engine.
        """
        self._require_open()
        _require_path("engine.save_checkpoint: save_dir", save_dir)
        if self._gradient is StepGradient.FINAL:
            raise CheckpointError("engine.save_checkpoint after a step's last backward pass: call engine.step() first.")
        if self._has_begun or self._count:
            steps = self.options.batch.accumulation_steps
            warnings.warn(checkpoint.AMID_A_STEP.format(self._count, steps), stacklevel=2)
        with self._watch.together("save_checkpoint"):
            self._take_note_of_last_step()
            kept = UsersPart(client_state, latest=save_latest, frozen=not exclude_frozen_parameters)
            return checkpoint.save(self, self._saver, save_dir, tag, kept)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, Any]:
        """Go on from what :meth:`save_checkpoint` kept, at any size, stage and ratio; all processes call it.

        Gradients of a step at work are forgotten. See :func:`gptpar.deepspeed.engines.checkpoint.load`.
        """
        self._require_open()
        _require_path("engine.load_checkpoint: load_dir", load_dir)
        trains = self.options.has_optimizer
        what = (
            load_module_strict,
            load_optimizer_states and trains,
            load_lr_scheduler_states and trains,
            load_module_only,
        )
        with self._watch.together("load_checkpoint"):
            self._saver.finish()
            self._take_note_of_last_step()
            self._drop_step()
            return checkpoint.load(self, load_dir, tag, Chosen(*what))

    def wait_for_checkpoint(self) -> None:
        """Return when the last :meth:`save_checkpoint` is on the disk; all processes call it.

        Raises:
            CheckpointError: on every process: it failed. Older checkpoints are whole.
        """
        with self._watch.together("wait_for_checkpoint"):
            self._saver.finish(required=True)

    def _finish_save(self, *, alone: bool) -> None:
        """The last of it; ``alone``: other processes may not come.

        Raises:
            CheckpointError: it failed.
        """
        if alone:
            self._saver.abandon_at_exit()
        else:
            self._saver.finish(required=True)


def _require_path(name: str, folder: object) -> None:
    """Raise an ArgumentError if this is no path; ``None`` and an empty text are mostly a setting that is missing."""
    if not isinstance(folder, str | os.PathLike):
        raise ArgumentError(wrong_type(name, folder, "the path of a folder is needed"))
    if not os.fspath(folder):
        raise ArgumentError(f'{name} is empty: the path of a folder is needed; "." is the present one.')
