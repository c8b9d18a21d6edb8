"""``deepspeed.zero``: models that are built without memory, and access to whole parameters.

Under ``zero.Init`` a model's parameters are on the meta device, and a recording makes their values later
(:func:`gptpar.deferred_init`): in ``GatheredParameters``, or when ``initialize`` lays them out. They are those of a
construction without ``zero.Init``, bit for bit. Buffers have their values at once, as in DeepSpeed.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from gptpar.adapter.deferred import Recording, _AsOnCpu, _on_meta, _OnMeta, deferred_init
from gptpar.deepspeed.engines.arguments import mpu_problems
from gptpar.deepspeed.engines.training_engine import TrainingEngine
from gptpar.deepspeed.processes import init_distributed
from gptpar.errors import ConfigError, GptparError
from gptpar.pipeline.stage import place_parameter

_IDS = itertools.count()


class ZeroParamStatus(enum.Enum):
    """Whether a parameter can be read: outside of ``GatheredParameters`` a ZeRO-3 parameter may be elsewhere."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ValueOwner:
    """Who has a parameter's value. Copies and pickles of the parameter have none.

    Attributes:
        recording: makes it, until an engine has it.
        engine: has it, once it is trained.
        name: of the parameter in the engine's module.
    """

    def __init__(self, recording: Recording | None = None, engine: TrainingEngine | None = None, name: str = ""):
        self.recording, self.name = recording, name
        self._engine = None if engine is None else weakref.ref(engine)

    @property
    def engine(self) -> TrainingEngine | None:
        engine = None if self._engine is None else self._engine()
        return None if engine is None or engine.is_closed else engine

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return ValueOwner, ()


def owner_of(parameter: torch.Tensor) -> ValueOwner:
    """Who has a parameter's value; an empty one for a parameter that has it itself."""
    return getattr(parameter, "ds_owner", None) or ValueOwner()


def _mark(parameter: Any, owner: ValueOwner, *, divided: bool) -> None:
    parameter.ds_owner = owner
    if divided:
        if not hasattr(parameter, "ds_id"):
            parameter.ds_id = next(_IDS)
        parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        processes = dist.get_world_size() if dist.is_initialized() else 1
        parameter.partition_numel = partial(int, -(-parameter.numel() // processes))  # a partial can be pickled


class Init:
    """A context in which models are built without memory for their parameters; it initializes torch.distributed.

    Args:
        module: a model that exists already: its parameters get DeepSpeed's attributes and keep their values.
        data_parallel_group, sequence_data_parallel_group, mpu: describe the processes, which must be data-parallel
            alone, all in one group.
        remote_device: ``cpu``, a GPU or none: the configuration's ``offload_param`` says where parameters are.
        enabled: whether the context does anything.
        dtype: of the floating-point parameters at the end of the context, whose values are rounded to it; default:
            they keep their own. A configuration with ``fp16`` or ``bf16`` has the last word, in ``initialize``.
        zero_quantized_weights, zero_quantized_nontrainable_weights: false.

    The other arguments choose memory and messages, which ``initialize`` chooses here.

    Raises:
        ConfigError: on entry: processes, device, weights or number format cannot be; it names all.
    """

    _outermost: ClassVar[Init | None] = None

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: dist.ProcessGroup | None = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ):
        self._enabled, self._stack = enabled, contextlib.ExitStack()
        self._recording: Recording | None = None
        self._modules: list[nn.Module] = []
        self._mpu, self._groups = mpu, (data_parallel_group, sequence_data_parallel_group)
        self._dtype, self._problems = dtype, []
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            self._problems.append(f"zero.Init: dtype is {dtype!r}: give torch.float32 or another format of floats.")
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            self._problems.append("zero.Init: quantized weights would change the numbers: leave them out.")
        if remote_device == "nvme" or param_swapper is not None:
            self._problems.append("zero.Init: parameters are on the GPU or in host memory: give remote_device='cpu'.")
        for parameter in module.parameters() if module is not None else ():
            if enabled and not hasattr(parameter, "ds_id"):
                _mark(parameter, ValueOwner(), divided=True)

    def __enter__(self) -> Init:
        outer = Init._outermost
        if self._enabled and not in_init():
            init_distributed()
            self._check()
            Init._outermost, self._recording = self, self._stack.enter_context(deferred_init(seed=None))
            for register in (
                torch_module.register_module_parameter_registration_hook,
                torch_module.register_module_buffer_registration_hook,
                torch_module.register_module_module_registration_hook,
            ):
                hook = register(lambda module, name, value: self._modules.extend(_modules_of(module, value)))
                self._stack.callback(hook.remove)
        elif self._enabled and outer is not None and self._dtype not in (None, outer._dtype):
            raise ConfigError([f"zero.Init: dtype is {self._dtype}, and {outer._dtype} around it: give both the same."])
        return self

    def _check(self) -> None:
        world = dist.get_world_size()
        sizes = [dist.get_world_size(group) for group in self._groups if group is not None]
        problems = [*self._problems, *mpu_problems(self._mpu, world, is_pipeline=False)]
        problems += [
            f"zero.Init: a data-parallel group has {size} of {world} processes: parameters are divided over all of "
            "them, so leave it out."
            for size in sizes
            if size != world
        ]
        if problems:
            raise ConfigError(problems)

    def __exit__(self, *exception: object) -> None:
        if self._recording is not None:
            self._end(failed=exception[0] is not None)
        elif (outer := Init._outermost) is not None and outer._recording is not None:
            _mark_built(outer._recording, outer._modules)

    def _end(self, *, failed: bool = False) -> None:
        recording, modules = self._recording, dict.fromkeys(self._modules)
        for parameter in [p for module in modules for p in module.parameters(recurse=False)]:
            if self._dtype is not None and parameter.is_floating_point() and not failed:
                parameter.data = parameter.data.to(self._dtype)
        self._stack.close()
        Init._outermost = self._recording = None
        if recording is not None and not failed:
            _finish(recording, modules)


def in_init() -> bool:
    """Whether this is inside of ``zero.Init`` or ``gptpar.deferred_init``, where no tensor has memory."""
    return any(isinstance(mode, _OnMeta) for mode in _get_current_dispatch_mode_stack())


def end_init() -> None:
    """End the ``zero.Init`` around this, if there is one: ``initialize`` and training need tensors with memory.

    Raises:
        GptparError: tensors have no memory for another reason, or a mode of torch was begun inside of ``zero.Init``.
    """
    modes = _get_current_dispatch_mode_stack()[-1:] + _get_current_function_mode_stack()[-1:]
    if in_init() and (Init._outermost is None or [*map(type, modes)] != [_OnMeta, _AsOnCpu]):
        raise GptparError("deepspeed.initialize where no tensor has memory: call it after that block.")
    if Init._outermost is not None:
        Init._outermost._end()


def _modules_of(module: nn.Module, value: object) -> list[nn.Module]:
    return [module, value] if isinstance(value, nn.Module) else [module]


def _mark_built(recording: Recording, modules: Iterable[nn.Module]) -> None:
    for parameter in [p for module in modules for p in module.parameters(recurse=False)]:
        if _on_meta(parameter) and not hasattr(parameter, "ds_id"):
            _mark(parameter, ValueOwner(recording), divided=True)


def _finish(recording: Recording, modules: Iterable[nn.Module]) -> None:
    """Mark the parameters of modules that were built, and give their other tensors values."""
    _mark_built(recording, modules)
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = recording.make(buffer, "cpu", name)
        recording.make_attributes(module)


class OnDevice:
    """A context in which models are built on a device; on ``"meta"`` without memory and without values.

    Args:
        dtype: of floating-point tensors whose dtype is not given.
        device: of tensors whose device is not given.
        enabled: whether the context does anything.
    """

    def __init__(self, dtype: torch.dtype, device: str = "meta", enabled: bool = True):
        self._dtype, self._device, self._enabled = dtype, device, enabled
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        if self._enabled:
            self._stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
            self._stack.enter_context(torch.device(self._device))

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def give_value(parameter: Any) -> None:
    """Give a parameter of ``zero.Init`` its value, in host memory."""
    recording = owner_of(parameter).recording
    if recording is not None and parameter.is_meta:
        place_parameter(parameter, recording.make(parameter))
        parameter.ds_owner = ValueOwner()


def take_recording(model: nn.Module) -> Recording | None:
    """The recording of the parameters that still have no values, for ``gptpar.initialize``.

    Where parts of a model were built in several contexts, only one part can wait: the others get their values here.
    """
    waiting = [parameter for parameter in model.parameters() if parameter.is_meta]
    recordings = [owner_of(parameter).recording for parameter in waiting]
    first = next((recording for recording in recordings if recording is not None), None)
    for parameter, recording in zip(waiting, recordings, strict=True):
        if recording is not first:
            give_value(parameter)
    return first


def mark_trained(engine: TrainingEngine) -> None:
    """Give an engine's parameters DeepSpeed's attributes, by which they are found."""
    for parameter, name in engine.weights.names.items():
        _mark(parameter, ValueOwner(None, engine, name), divided=engine.zero_optimization_stage() == 3)


class _CopiesToCpu(TorchFunctionMode):
    """A context in which ``.cpu()`` and ``.to()`` copy tensors of the CPU, too.

    Parameters lose their memory after ``GatheredParameters``, and programs keep what these calls return.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_same = func in (torch.Tensor.cpu, torch.Tensor.to) and result is args[0]
        return result.clone() if is_same and not isinstance(result, nn.Parameter) else result


class GatheredParameters:
    """A context in which parameters are whole; all processes enter it.

    Args:
        params: a parameter, or several, or none.
        modifier_rank: the process whose changes count, for all; ``None``: parameters are only read.
        fwd_module: without effect: a module's own forward has its parameters.
        enabled: whether the context does anything.
    """

    def __init__(self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True):
        listed = [params] if isinstance(params, torch.Tensor) else list(params or ())
        self._params = list({id(one): one for one in listed if isinstance(one, torch.Tensor)}.values())
        self._rank, self._enabled, self._stack = modifier_rank, enabled, contextlib.ExitStack()

    def __enter__(self) -> None:
        if not self._enabled:
            return
        engines = {id(engine): engine for one in self._params if (engine := owner_of(one).engine) is not None}
        own = [one for one in self._params if owner_of(one).engine is None]
        for parameter in own:
            give_value(parameter)
        self._stack.callback(self._share, own)
        for engine in engines.values():
            self._stack.enter_context(engine.gathered(self._rank))
            if engine.device.type == "cpu":
                self._stack.enter_context(_CopiesToCpu())
        divided = [one for one in self._params if hasattr(one, "ds_id")]
        self._stack.callback(_set_status, divided, ZeroParamStatus.NOT_AVAILABLE)
        _set_status(divided, ZeroParamStatus.AVAILABLE)

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    @torch.no_grad()
    def _share(self, parameters: Iterable[torch.Tensor]) -> None:
        """Give all processes the values of one, of parameters that no engine has."""
        if self._rank is not None and dist.is_initialized() and dist.get_world_size() > 1:
            for parameter in parameters:
                if hasattr(parameter, "ds_id"):
                    dist.broadcast(parameter.data, self._rank)


def _set_status(parameters: Iterable[Any], status: ZeroParamStatus) -> None:
    for parameter in parameters:
        parameter.ds_status = status


@contextlib.contextmanager
def unwrap_model_for_generation(model: TrainingEngine) -> Iterator[nn.Module]:
    """The module of an engine with whole parameters, to generate texts with it; all processes enter it."""
    with model.gathered():
        yield model.module


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Nothing: a parameter that another module reads is found when it is read.

    Raises:
        GptparError: this is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise GptparError(f"register_external_parameter takes a torch.nn.Parameter, not a {type(parameter).__name__}.")


def zero_wrapper_for_fp_tensor_constructor(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function itself: ``zero.Init`` keeps the number format of the tensors that a constructor makes."""
    return function
