"""Finds the reasons why a module's tensors cannot be laid out in flat memory. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gptpar.engine.tensors import tensors_in

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}
LIBRARIES = {"torch", "apex", "fairscale", "megatron", "torch_xla"}
"""Whose wrappers sum gradients by themselves; a program's own wrapper, such as GPT-2's of 2019, sums when asked to."""


def problems_of(module: nn.Module) -> list[str]:
    """A sentence for each tensor or submodule of a module that flat units cannot hold."""
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    flat = {}
    problems = [*_wrappers(module), *_renormalised(module)]
    if isinstance(module, torch.jit.ScriptModule):
        problems.append("the model is a torch.jit.ScriptModule, which calls no hooks: give the module before scripting")
    for name, tensor in (parameters | buffers).items():
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            problems.append(f"{name} has no shape yet: call the model once, so that its lazy modules get theirs")
        elif name in parameters and (problem := _problem_of(tensor)):
            problems.append(f"the parameter {name} {problem}")
        elif tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor):
            flat[name] = tensor
    problems += _kept_views(module, parameters)
    problems += _several_devices({name: tensor for name, tensor in flat.items() if name in parameters})
    return problems + list(_overlaps(flat, set(parameters)))


def _problem_of(parameter: torch.Tensor) -> str | None:
    """Why a parameter cannot be laid out, as the end of a sentence that begins with its name."""
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    if "DTensor" in {cls.__name__ for cls in type(parameter).__mro__}:
        return "is a DTensor: give the model before it is sharded; initialize shards it"
    if is_traceable_wrapper_subclass(parameter):
        return f"is a {type(parameter).__name__}, no plain tensor: give the model before it is quantised or wrapped"
    if parameter.layout != torch.strided:
        return f"is sparse ({parameter.layout}): make it dense"
    if parameter.is_complex():
        return f"is complex ({parameter.dtype}): keep its real and imaginary parts (torch.view_as_real) as a parameter"
    if parameter.dtype not in DTYPES:
        return f"is quantised or no number to train ({parameter.dtype}): use one of {dtypes}, or a buffer"
    if any(stride == 0 and size > 1 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        return f"is expanded: several of its {parameter.numel()} elements are one in memory; use .contiguous()"
    return None


def _wrappers(module: nn.Module) -> Iterator[str]:
    for path, one in module.named_modules():
        classes = {cls.__name__ for cls in type(one).__mro__ if cls.__module__.split(".")[0] in LIBRARIES}
        for name in WRAPPERS & classes:
            yield f"{path or 'the model'} is wrapped in {name}: give the module inside; initialize divides the work"


def _renormalised(module: nn.Module) -> Iterator[str]:
    for path, one in module.named_modules():
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.max_norm is not None:
            yield (
                f"{path or 'the model'} has max_norm: its forward changes the rows that it reads, which are others on "
                "each process, so that processes would hold different weights; set it to None, and limit the norms of "
                "what the embedding returns"
            )


def _kept_views(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[str]:
    """Problems of attributes that would still refer to a parameter's former memory."""
    own = {id(parameter) for parameter in parameters.values()}
    lazy = (UninitializedParameter,)
    names = {p.untyped_storage()._cdata: name for name, p in parameters.items() if _has_storage(p, lazy)}
    for path, one in module.named_modules():
        for attribute, value in vars(one).items():
            if attribute in ("_parameters", "_buffers", "_modules") or attribute in _made_before_forward(one):
                continue
            for tensor in tensors_in(value):
                if id(tensor) in own or not _has_storage(tensor, lazy):
                    continue
                if (name := names.get(tensor.untyped_storage()._cdata)) is not None:
                    place = f"{path}.{attribute}" if path else attribute
                    yield f"{place} keeps a view of the parameter {name}, whose memory changes: take it in the forward"


def _made_before_forward(module: nn.Module) -> set[str]:
    """Attributes that hooks of torch.nn.utils (spectral_norm, weight_norm) make anew before each forward."""
    hooks = module._forward_pre_hooks.values()
    return {hook.name for hook in hooks if isinstance(hook, SpectralNorm | WeightNorm)}


def _has_storage(tensor: torch.Tensor, lazy: tuple[type, ...]) -> bool:
    plain = tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)
    return plain and not isinstance(tensor, lazy)


def _several_devices(parameters: Mapping[str, torch.Tensor]) -> Iterator[str]:
    devices = Counter(str(parameter.device) for parameter in parameters.values() if not parameter.is_meta)
    if len(devices) > 1:
        counts = ", ".join(f"{count} on {device}" for device, count in devices.items())
        yield f"the parameters are on several devices ({counts}): move the model to one"


def _overlaps(tensors: Mapping[str, torch.Tensor], parameters: set[str]) -> Iterator[str]:
    """Problems of tensors in a parameter's memory: each would get memory of its own, and no longer change with it."""
    by_storage = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.numel():
            start = int(tensor.storage_offset()) * tensor.itemsize
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            extent = (start, start + int(last + 1) * tensor.itemsize, name)
            by_storage[tensor.untyped_storage()._cdata].append(extent)
    for extents in by_storage.values():
        reached, holder = 0, ""
        for start, stop, name in sorted(extents):
            if start < reached and {name, holder} & parameters:
                yield (
                    f"{name} lies in the memory of {holder}, but is not the same object: "
                    "assign one nn.Parameter to both modules, or give each memory of its own (.clone())"
                )
            if stop > reached:
                reached, holder = stop, name
