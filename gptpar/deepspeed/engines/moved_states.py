"""``engine.offload_states``: a device's memory for other programs between phases of training."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

import torch

from gptpar.deepspeed.engines.engine_state import EngineState
from gptpar.errors import GptparError

_STATES, _MASTERS, _GRADIENTS = ("optim_states",), ("hp_params",), ("lp_grads", "contiguous_grad_buffer")
_KINDS = (*_STATES, *_MASTERS, *_GRADIENTS, "lp_params")


class _Away:
    """Takes the place of the engine's optimizer while its state is in host memory."""

    def __getattr__(self, name: str) -> NoReturn:
        raise GptparError(
            "engine.offload_states() has moved the optimizer's state to host memory, which training, checkpoints and "
            "reads of whole tensors need: call engine.reload_states() first."
        )


class MovedStates(EngineState):
    """Moves the state that only training needs to host memory, and back.

    The device's vectors keep their tensors: their storage is emptied, and gets memory again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._moved: tuple[Any, list[tuple[torch.UntypedStorage, torch.Tensor]]] | None = None

    def offload_states(
        self,
        include: Collection[str] | None = None,
        device: str = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move the device's optimizer states, master weights and gradient sums to host memory, between two steps.

        Model parameters stay: the module can be called without gradients meanwhile. Master weights that are the model
        parameters themselves (fp32, one process) stay with them. What the CPU optimizer has is there already.

        Args:
            include: of ``OffloadStateTypeEnum``, what is moved; default: everything. ``lp_params`` has no effect.
            device: ``cpu``; with ``none`` nothing is moved.
            pin_memory: whether the host memory is page-locked, which makes copies fast.
            non_blocking: without effect: the memory is free when this returns.

        Raises:
            GptparError: a step has begun, or the states are away already.
            ValueError: ``device`` is another one, as in DeepSpeed, or ``include`` has another name.
        """
        self._require_open()
        self._require_no_step()
        if device == "none":
            return
        _require_known(include, device)
        if self._moved is not None:
            raise GptparError("engine.offload_states() twice: call engine.reload_states() in between.")
        self._take_note_of_last_step()
        self._let_go_of_recording()
        self.engine.finish()
        optimizer = self.engine.optimizer
        optimizer.guard.wait_until_read()
        moved = [(storage, _on_host(storage, pinned=pin_memory)) for storage in self._storages(include)]
        for storage, _ in moved:
            storage.resize_(0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._moved, self.engine.optimizer = (optimizer, moved), _Away()  # type: ignore[assignment]

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what :meth:`offload_states` has moved; ``non_blocking`` has no effect."""
        self._require_open()
        if self._moved is None:
            return
        optimizer, moved = self._moved
        for storage, values in moved:
            storage.resize_(values.nbytes)
            _bytes_of(storage).copy_(values)
        self.engine.optimizer, self._moved = optimizer, None

    def _storages(self, include: Collection[str] | None) -> list[torch.UntypedStorage]:
        """The memory of what is asked for, each once."""
        optimizer = self.engine.optimizer
        tensors = [optimizer.vectors[name] for name in optimizer.states if _asked(include, _STATES)]
        if _asked(include, _MASTERS) and not self.engine.masters_are_parameters:
            tensors.append(optimizer.master)
        tensors += self.engine.gradients.memory.tensors if _asked(include, _GRADIENTS) else []
        return list({one.data_ptr(): one for one in (tensor.untyped_storage() for tensor in tensors)}.values())

    def _let_go_of_recording(self) -> None:
        """A recorded step refers to the memory of gradients."""


def _require_known(include: Collection[str] | None, device: str) -> None:
    if device != "cpu":
        raise ValueError(f"engine.offload_states(device={str(device)!r}): states move to 'cpu' alone.")
    for kind in include or ():
        if kind not in _KINDS:
            raise ValueError(f"engine.offload_states: include has {str(kind)!r}, which is none of {', '.join(_KINDS)}.")


def _asked(include: Collection[str] | None, kinds: tuple[str, ...]) -> bool:
    return include is None or any(kind in include for kind in kinds)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[n] a view of all of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _on_host(storage: torch.UntypedStorage, *, pinned: bool) -> torch.Tensor:
    """[n] a copy in host memory."""
    pin = pinned and storage.device.type == "cuda"
    return torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pin).copy_(_bytes_of(storage))
