"""Activation recomputation: frees a layer's activations and computes them again in the backward pass.

Only the layer's input is kept. Two options also save the memory of the kept input: either each tensor-parallel process
keeps a part of the input, which all of them hold (DeepSpeed's ``partition_activations``), or the input is kept in host
memory (DeepSpeed's ``cpu_checkpointing``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from gptpar.config import RecomputeConfig
from gptpar.pipeline.host_activations import HostActivations, HostBlock, HostTensor
from gptpar.topology.groups import all_gather_single


@dataclass(frozen=True)
class Keep:
    """The way in which a recomputed layer's input is kept until the backward pass.

    Attributes:
        partition: (group, rank, size) of processes that hold the same input; each keeps one part of its
            elements. The backward pass gathers the parts: all processes must run their backward passes in one order.
        host: keeps inputs in host memory; ``None``: they stay on the device.
        random: whether the layers may draw random numbers; the recomputation then draws the same numbers again.
    """

    partition: tuple[dist.ProcessGroup, int, int] | None = None
    host: HostActivations | None = None
    random: bool = True

    @property
    def changes_nothing(self) -> bool:
        """Whether the input is kept as it is."""
        return self.partition is None and self.host is None


class _Kept(NamedTuple):
    """A saved input: ``data`` is the whole input or this process's flat part."""

    data: torch.Tensor | HostTensor
    shape: torch.Size


def recomputed(call: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, keep: Keep = Keep()) -> torch.Tensor:
    """Return ``call(x, *args)``, and keep only ``x`` for the backward pass, which computes the call again.

    If ``keep.random``, the recomputation draws the same random numbers. Without gradients this is a plain call.

    Args:
        call: a layer, or several in a row.
        x: the input; every rank of ``keep.partition`` must pass the same values.
        *args: further arguments, kept as they are.
        keep: how the input is kept.
    """
    if not torch.is_grad_enabled():
        return call(x, *args)
    with _input_hooks(x, keep):
        return checkpoint(partial(same_again, call), x, *args, use_reentrant=False, preserve_rng_state=keep.random)


def same_again(call: Callable[..., Any], *args: Any) -> Any:
    """Call a function that is computed again later.

    Left to itself, TorchScript saves other tensors for the backward pass in its second call than in its first, and
    torch's checkpoint takes one for another: gradients were wrong without an error.
    """
    with torch.jit.optimized_execution(False):
        return call(*args)


@contextmanager
def _input_hooks(x: torch.Tensor, keep: Keep) -> Iterator[None]:
    """Hooks that pack and unpack ``x`` when torch's checkpoint saves it.

    Tensors that the layer itself saves do not reach these hooks: checkpoint puts its own hooks around the layer.
    """
    if keep.changes_nothing:
        yield
        return
    address, shape, dtype = x.data_ptr(), x.shape, x.dtype  # not x itself: the hooks live as long as the graph

    def pack(saved: torch.Tensor) -> torch.Tensor | _Kept:
        is_input = (saved.data_ptr(), saved.shape, saved.dtype) == (address, shape, dtype)
        return _pack(saved.detach(), keep, block) if is_input and saved.numel() else saved

    def unpack(kept: torch.Tensor | _Kept) -> torch.Tensor:
        return _unpack(kept, keep) if isinstance(kept, _Kept) else kept

    context = nullcontext() if keep.host is None else keep.host.block(saves_first=True)
    with context as block, saved_tensors_hooks(pack, unpack):
        yield


def _pack(x: torch.Tensor, keep: Keep, block: HostBlock | None) -> _Kept:
    data = x
    if keep.partition is not None:
        _, rank, size = keep.partition
        length = -(-x.numel() // size)  # the same on all ranks; the last parts are padded
        part = x.reshape(-1)[rank * length : (rank + 1) * length]
        data = x.new_zeros(length)
        data[: part.numel()] = part
    if keep.host is None or block is None:
        return _Kept(data, x.shape)
    if data.untyped_storage().nbytes() >= 2 * data.nbytes:  # a slice would leave with all that it is cut from
        data = data.clone(memory_format=torch.contiguous_format)
    return _Kept(keep.host.put(block, data), x.shape)


@torch.no_grad()
def _unpack(kept: _Kept, keep: Keep) -> torch.Tensor:
    data = kept.data
    if isinstance(data, HostTensor):
        assert keep.host is not None
        data = keep.host.take(data)
    if keep.partition is None:
        return data
    group, _, size = keep.partition
    full = data.new_empty(size * data.numel())
    all_gather_single(full, data, group=group)
    return full[: kept.shape.numel()].view(kept.shape)


def recompute_groups(config: RecomputeConfig, block_names: Sequence[str]) -> list[tuple[str, ...]]:
    """The groups of consecutive blocks of a (virtual) stage that are recomputed together.

    Args:
        block_names: the virtual stage's blocks in forward order.

    Returns:
        With ``uniform``, all blocks in groups of ``recompute_num_layers`` (default 1; the last may be shorter). With
        ``block``, the first ``recompute_num_layers`` blocks (default: all), each a group. Empty unless whole blocks are
        recomputed.
    """
    if config.recompute_granularity != "full":
        return []
    count = config.recompute_num_layers
    if config.recompute_method == "uniform":
        step = count or 1
        return [tuple(block_names[i : i + step]) for i in range(0, len(block_names), step)]
    return [(name,) for name in block_names[:count]]
