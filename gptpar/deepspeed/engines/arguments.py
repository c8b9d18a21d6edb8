"""DeepSpeed's arguments of ``gptpar.initialize``: the script's command line, and descriptions of the processes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from gptpar.errors import ConfigError, is_whole, wrong_type
from gptpar.system.host import local_rank

_DATA_SIZE = "get_data_parallel_world_size"
_OTHER_SIZES = (
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_pipe_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
    "get_sequence_parallel_world_size",
    "get_context_parallel_world_size",
)
"""Methods of a model-parallel unit, by Megatron's and DeepSpeed's names."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's two flags, ``--deepspeed`` and ``--deepspeed_config``, to a script's parser, and return it.

    A script whose launcher passes ``--local_rank`` declares that flag itself, as with DeepSpeed. Without the flag, the
    environment says which rank a process is.

    Raises:
        ConfigError: it is no parser.
    """
    if not hasattr(parser, "add_argument_group"):
        raise ConfigError([wrong_type("parser", parser, "an argparse.ArgumentParser is needed")])
    group = parser.add_argument_group("DeepSpeed", "configuration of gptpar.initialize, which is DeepSpeed's")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use: gptpar ignores it")
    group.add_argument("--deepspeed_config", metavar="JSON", help="DeepSpeed's configuration file")
    return parser


def chosen_config(config: Any, config_params: Any, args: object) -> Any:
    """The configuration that was passed, if any; the file of ``args.deepspeed_config`` is read elsewhere.

    ``config`` precedes ``config_params``, its former name; both precede an ``args.deepspeed`` that is not a flag, and
    that ``args.deepscale_config``, the oldest name of ``args.deepspeed_config``.
    """
    for given in (config, config_params):
        if given is not None:
            return given
    if getattr(args, "deepspeed_config", None) is not None:
        return None
    flag = getattr(args, "deepspeed", None)
    return flag if flag and isinstance(flag, str | os.PathLike | Mapping) else getattr(args, "deepscale_config", None)


def before_meeting(distributed_port: int | None, dist_init_required: bool | None) -> None:
    """Prepare the meeting of the processes.

    Args:
        distributed_port: the port of the first process, if the environment has no ``MASTER_PORT``.
        dist_init_required: ``False``: the script has initialised ``torch.distributed``.

    Raises:
        ConfigError: there are several processes, and the script has not initialised it.
    """
    if distributed_port is not None:
        if not str(distributed_port).isdecimal():
            raise ConfigError([wrong_type("distributed_port", distributed_port, "the number of a port is needed")])
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    if dist_init_required is False and several and not dist.is_initialized():
        raise ConfigError(
            [
                f"dist_init_required is False, torch.distributed is not initialised, and there are "
                f"{os.environ['WORLD_SIZE']} processes: call torch.distributed.init_process_group first, or leave "
                "dist_init_required out."
            ]
        )


def take_arguments(args: Any, mpu: Any, mesh_param: Any, *, world: int, is_pipeline: bool) -> None:
    """Check the descriptions of the processes, and set ``args.local_rank``, if it exists, to this process's.

    Args:
        args: the script's command line.
        mpu: a model-parallel unit: an object that describes the axes of processes.
        mesh_param: (data-parallel, sequence-parallel) sizes.
        world: number of processes.
        is_pipeline: whether the model is a pipeline or a list of layers.

    Raises:
        ConfigError: descriptions and processes differ; it names all differences.
    """
    problems = [*mpu_problems(mpu, world, is_pipeline), *_mesh_problems(mesh_param, world)]
    here, given = local_rank(os.environ), getattr(args, "local_rank", None)
    if given is not None and not is_whole(given):
        problems.append(f"args.local_rank is of type {type(given).__name__}: a whole number is needed (type=int).")
    elif given and given >= 0 and here not in (None, given):  # 0 is the usual default of a program's own flag
        problems.append(
            f"args.local_rank is {given}, and the environment says that this process is number {here} of its machine "
            "(LOCAL_RANK): leave --local_rank to the launcher, or out."
        )
    if problems:
        raise ConfigError(problems)
    if here is not None and hasattr(args, "local_rank"):
        args.local_rank = here


def mpu_problems(mpu: Any, world: int, is_pipeline: bool) -> Iterator[str]:
    """What a model-parallel unit says of the processes that does not hold; nothing if there is none."""
    if mpu is None:
        return
    if is_pipeline:
        yield "mpu is passed beside a pipeline, which places its stages itself: leave mpu out."
        return
    remedy = "gptpar.initialize trains a module whole on each process: leave mpu out, or use gptpar pretrain for GPT"
    sizes = {name: int(getattr(mpu, name)()) for name in (_DATA_SIZE, *_OTHER_SIZES) if hasattr(mpu, name)}
    if _DATA_SIZE not in sizes:
        yield f"mpu, a {type(mpu).__name__}, has no {_DATA_SIZE}(): {remedy}."
    elif sizes[_DATA_SIZE] != world:
        yield f"mpu.{_DATA_SIZE}() is {sizes[_DATA_SIZE]} of {world} process(es): {remedy}."
    for name in _OTHER_SIZES:
        if sizes.get(name, 1) != 1:
            yield f"mpu.{name}() is {sizes[name]}: {remedy}."


def _mesh_problems(mesh: Any, world: int) -> Iterator[str]:
    if mesh is not None and tuple(mesh) != (world, 1):
        yield (
            f"mesh_param is {mesh}, and there is data parallelism alone: leave it out, or pass ({world}, 1), "
            "(data-parallel, sequence-parallel) processes."
        )
