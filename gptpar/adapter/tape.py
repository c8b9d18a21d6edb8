"""A tape of the operators that wrote tensors without memory; it can replay those that one tensor needs.

Every storage on the meta device has a history: the operators that wrote it. A tensor is a region of a storage, so that
views, ties, ``.data`` and in-place operations need no special treatment. A replay runs on the CPU, and skips operators
whose results are overwritten before they are read. The n-th random operator draws from a generator seeded with
(seed, n), or with the state that torch's own generator had, so that its values depend neither on the device nor on
which other operators are replayed.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from gptpar.errors import GptparError
from gptpar.system.hashes import seed_of

aten = torch.ops.aten
# Operators that overwrite every element of their first argument without reading it.
OVERWRITING = {aten.normal_, aten.uniform_, aten.zero_, aten.fill_, aten.copy_, aten.random_, aten.bernoulli_}

Memory = dict[int, torch.UntypedStorage]


@dataclass(frozen=True)
class Region:
    """A tensor as a region of a storage.

    Attributes:
        storage: key in the tape.
        size, stride, offset: in elements of ``dtype``.
        conjugate, negative: torch's bits of lazy conjugation and negation.
    """

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    def of(self, memory: torch.UntypedStorage) -> torch.Tensor:
        """The region as a tensor in real memory of its storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        tensor.set_(memory, self.offset, self.size, self.stride)  # type: ignore[call-overload]
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor

    def fills(self, num_bytes: int) -> bool:
        """Whether the region is all of its storage."""
        return self.offset == 0 and self.size.numel() * self.dtype.itemsize == num_bytes


@dataclass(frozen=True)
class Operation:
    """One recorded call of an operator; tensors among its arguments are regions, or real constants.

    Attributes:
        draw: the state of the generator from which it draws; ``None``: it is not random.
        default_dtype: torch's at the call, if the dtype of the result depends on it.
        reads: storages whose earlier values it reads.
        replaces: storages that it overwrites completely.
        writes: storages that it writes, completely or in part.
        made: for each returned tensor, its region if it has a new storage, else ``None``.
    """

    function: torch._ops.OpOverload
    args: tuple
    kwargs: dict[str, Any]
    draw: torch.Tensor | None = None
    default_dtype: torch.dtype | None = None
    reads: frozenset[int] = frozenset()
    replaces: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    made: tuple[Region | None, ...] = ()

    @property
    def regions(self) -> list[Region]:
        """The regions among its arguments, in order."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Region)]


class Tape:
    """Operators in the order of their calls, and the operators that wrote each storage on meta.

    Args:
        seed: of all random values; ``None``: they are those that torch's default generator would draw.
    """

    def __init__(self, seed: int | None):
        self._seed = seed
        self._num_draws = 0
        self._operations: list[Operation] = []
        self._writers: dict[int, list[int]] = {}  # storage -> indices of operations that write it, ascending
        self._storages: dict[int, torch.UntypedStorage] = {}  # keeps them, so that no key is used twice
        self._foreign: set[int] = set()
        self._ambient = threading.Lock()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage was made under the recording."""
        key = tensor.untyped_storage()._cdata
        return key in self._storages and key not in self._foreign

    def enter(self, tensor: torch.Tensor, *, foreign: bool = False) -> tuple[Region, bool]:
        """(the region of a tensor on meta, whether its storage is new to the tape).

        Args:
            foreign: whether a new storage comes from outside of the recording, with unknown values.
        """
        storage = tensor.untyped_storage()
        new = storage._cdata not in self._storages
        if new:
            self._storages[storage._cdata] = storage
            if foreign:
                self._foreign.add(storage._cdata)
        place = (storage._cdata, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        return Region(*place, tensor.is_conj(), tensor.is_neg()), new

    def write(self, operation: Operation) -> None:
        """Append an operation."""
        for storage in operation.writes:
            self._writers.setdefault(storage, []).append(len(self._operations))
        self._operations.append(operation)

    def constant(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor on meta whose values are a copy of these."""
        copy = values.detach().to("cpu", copy=True)
        tensor = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device="meta")
        region, _ = self.enter(tensor)
        itself = frozenset([region.storage])
        self.write(Operation(aten.clone.default, (copy,), {}, replaces=itself, writes=itself, made=(region,)))
        return tensor

    def overwrites(self, function: torch._ops.OpOverload, target: Region, others: Sequence[Region]) -> bool:
        """Whether an in-place operator overwrites its target's whole storage without reading it."""
        whole = target.fills(self._storages[target.storage].nbytes())
        reads = any(target.storage == other.storage for other in others)
        return function.overloadpacket in OVERWRITING and whole and not reads

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """A meta tensor's values, in new memory on the CPU.

        Raises:
            GptparError: they depend on a tensor from outside of the recording.
        """
        region, _ = self.enter(tensor, foreign=True)
        memory: Memory = {}
        with _disable_current_modes(), torch.no_grad():
            for index in sorted(self._needed(region.storage)):
                self._replay(self._operations[index], memory)
            made = region.of(self._memory(region.storage, memory))
            lazy = region.conjugate or region.negative
            return made if region.fills(made.untyped_storage().nbytes()) and not lazy else made.clone()

    def next_draw(self) -> torch.Tensor:
        """The state of the generator from which the next random operator draws."""
        if self._seed is None:
            return torch.default_generator.get_state()
        number, self._num_draws = self._num_draws, self._num_draws + 1
        return torch.Generator().manual_seed(seed_of(self._seed, "deferred", number)).get_state()

    def advance(self, operation: Operation) -> None:
        """Let torch's default generator draw what a recorded operator would have drawn from it."""
        if self._seed is not None or operation.draw is None:
            return

        def empty(region: Region) -> torch.Tensor:
            return region.of(torch.zeros(self._storages[region.storage].nbytes(), dtype=torch.uint8).untyped_storage())

        with _disable_current_modes(), torch.no_grad():
            args, kwargs = tree_map_only(Region, empty, (operation.args, operation.kwargs))
            operation.function(*args, **kwargs)

    def call(self, operation: Operation, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call an operator on real tensors, with its own random generator and the default dtype of its recording."""
        generator = None
        if operation.draw is not None:
            generator = torch.Generator()
            generator.set_state(operation.draw)
        if generator is not None and "generator" in keywords(operation.function):
            kwargs, generator = kwargs | {"generator": generator}, None
        with self._ambience(generator, operation.default_dtype):
            return operation.function(*args, **kwargs)

    @contextmanager
    def _ambience(self, generator: torch.Generator | None, dtype: torch.dtype | None) -> Iterator[None]:
        """Replace torch's default generator and default dtype, for operators that do not take them as arguments."""
        if generator is None and dtype is None:
            yield
            return
        with self._ambient:
            state, default = torch.default_generator.get_state(), torch.get_default_dtype()
            try:
                if generator is not None:
                    torch.default_generator.set_state(generator.get_state())
                if dtype not in (None, default):
                    torch.set_default_dtype(dtype)
                yield
            finally:
                torch.default_generator.set_state(state)
                torch.set_default_dtype(default)

    def _needed(self, storage: int) -> set[int]:
        """The operations on which a storage's values depend."""
        needed: set[int] = set()
        visited: set[tuple[int, int]] = set()
        wanted = [(storage, len(self._operations))]
        while wanted:
            read, before = wanted.pop()
            writers = self._writers.get(read, [])
            for index in reversed(writers[: bisect_left(writers, before)]):
                if (read, index) in visited:
                    break
                visited.add((read, index))
                operation = self._operations[index]
                if index not in needed:
                    needed.add(index)
                    wanted += [(other, index) for other in operation.reads]
                if read in operation.replaces:
                    break
            else:
                if read in self._foreign:
                    raise GptparError(
                        "its values depend on a tensor that was on the meta device before gptpar.deferred_init: "
                        "make that one under the context as well"
                    )
        return needed

    def _memory(self, storage: int, memory: Memory) -> torch.UntypedStorage:
        """Real memory of a storage; bytes that no operator writes are zero, and thus the same everywhere."""
        if storage not in memory:
            num_bytes = self._storages[storage].nbytes()
            memory[storage] = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
        return memory[storage]

    def _replay(self, operation: Operation, memory: Memory) -> None:
        """Run one operation, and store its results in the memory of their storages."""

        def real(region: Region) -> torch.Tensor:
            return region.of(self._memory(region.storage, memory))

        args, kwargs = tree_map_only(Region, real, (operation.args, operation.kwargs))
        results = tensors_in(self.call(operation, args, kwargs))
        for region, made in zip(operation.made, results, strict=True):
            if region is None:
                continue
            storage = made.untyped_storage()
            same = (made.stride(), made.storage_offset(), storage.nbytes()) == (
                region.stride,
                region.offset,
                self._storages[region.storage].nbytes(),
            )
            if same and all(storage._cdata != other._cdata for other in memory.values()):
                memory[region.storage] = storage
            else:  # the CPU's result has another layout, or is in another tensor's memory
                real(region).copy_(made)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested arguments or results, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def keywords(function: torch._ops.OpOverload) -> set[str]:
    """Names of an operator's keyword arguments."""
    return {argument.name for argument in function._schema.arguments if argument.kwarg_only}
