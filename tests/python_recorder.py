"""A recorder of steps that needs no GPU: operators are noted, and done again in replays, into the same memory."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptpar.engine.tensors import tensors_in

WAITS = "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"
NO_WORK = "aten::empty", "aten::new_empty"

Operator = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class PythonRecorder(TorchDispatchMode):
    """Like CUDA graphs: the recorded step itself changes nothing, what waits for the device is refused.

    Attributes:
        recordings, replays: how many there were; a replayed part counts as one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recordings = self.replays = 0
        self._part: list[Operator] | None = None
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._new: dict[int, torch.UntypedStorage] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        self.recordings += 1
        generator = torch.get_rng_state()
        try:
            with self:
                yield
        finally:
            for memory, values in self._before.values():
                memory.copy_(values, False)
            self._before.clear()
            torch.set_rng_state(generator)

    def begin_part(self) -> None:
        assert self._part is None
        self._part = []

    def end_part(self) -> Callable[[], None]:
        assert self._part is not None
        part, self._part = self._part, None
        return lambda: self._replay(part)

    def release(self) -> None:
        self._new.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert self._part is not None, f"{func} between two parts"
        if func._schema.name in WAITS:
            raise RuntimeError("called a synchronizing operation")
        self._keep(func, args, kwargs)
        result = func(*args, **kwargs)
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if tensor.untyped_storage()._cdata not in given:
                self._new[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        if not func._schema.name.startswith(NO_WORK):
            self._part.append((func, args, kwargs, result))
        return result

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep the values of memory that is about to be written, and was there before."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in tensors_in(value):
                    memory = tensor.untyped_storage()
                    if memory._cdata not in self._new and memory._cdata not in self._before:
                        self._before[memory._cdata] = memory, memory.clone()

    @torch.no_grad()
    def _replay(self, part: list[Operator]) -> None:
        self.replays += 1
        for func, args, kwargs, result in part:
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
            for mine, theirs in zip(tensors_in(result), tensors_in(func(*args, **kwargs)), strict=True):
                if mine.untyped_storage()._cdata not in given:
                    mine.detach().copy_(theirs)
