"""Checks the environment variables of torchrun, mpirun or srun (RANK, ...), and joins the other processes."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist

from gptpar.errors import GptparError, first_line
from gptpar.system.host import local_rank, place_on_machine, several_without_rank
from gptpar.system.interfaces import means_loopback, outward_interface
from gptpar.system.restart import SHARES_NO_STORE
from gptpar.system.source import source_hash
from gptpar.topology.agreement import require_same

Facts = Callable[[], Mapping[str, str]]
"""Returns what has to be the same on all processes; see :func:`gptpar.topology.agreement.require_same`."""


class NotMetError(GptparError):
    """The processes did not meet: a machine may be away, or a process may have died meanwhile."""

    is_accident = True


def world_from_environment() -> tuple[int, int, int]:
    """(rank, local rank, world size) as torchrun, mpirun or srun set them; (0, 0, 1) for a process on its own.

    Raises:
        GptparError: these variables are incomplete or contradictory; it names every problem.
    """
    environment = os.environ
    if problems := environment_problems(environment, torch.cuda.device_count()):
        raise GptparError(
            f"the environment describes no process of a run: {'; '.join(problems)}. Start the processes with torchrun "
            "or gptpar launch, which set these variables; set what is missing; or unset RANK, LOCAL_RANK and "
            "WORLD_SIZE for a run on this machine alone."
        )
    if "RANK" not in environment:
        return 0, 0, 1
    return int(environment["RANK"]), local_rank(environment) or 0, int(environment["WORLD_SIZE"])


def environment_problems(environment: Mapping[str, str], num_gpus: int) -> list[str]:
    """Problems of the variables that tell a process its rank.

    Args:
        num_gpus: number of GPUs that this process sees.
    """
    if problem := several_without_rank(environment):
        return [problem]
    names = [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in environment]
    problems = [f"{n}={environment[n]} is not a whole number" for n in names if not environment[n].isdecimal()]
    both = {"RANK", "WORLD_SIZE"} & environment.keys()
    if len(both) == 1:
        problems.append("of RANK and WORLD_SIZE only one is set")
    if len(both) < 2:
        return problems
    rank, size = environment["RANK"], environment["WORLD_SIZE"]
    if not problems and int(rank) >= int(size):
        problems.append(f"RANK={rank} is not below WORLD_SIZE={size}")
    return problems if size == "1" else [*problems, *_problems_of_several(environment, num_gpus)]


def _problems_of_several(environment: Mapping[str, str], num_gpus: int) -> Iterator[str]:
    """Problems of the variables that a process needs to meet the others."""
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environment.get(name)]:
        yield f"{' and '.join(missing)} not set: the address at which the processes meet"
    elif not environment["MASTER_PORT"].isdecimal():
        yield f"MASTER_PORT={environment['MASTER_PORT']} is not a whole number"
    if num_gpus > 1 and local_rank(environment) is None:
        yield f"LOCAL_RANK is not set: which of {num_gpus} GPUs is this process's"


@contextlib.contextmanager
def open_world(backend: str | None, timeout_minutes: float, facts: Facts = dict) -> Iterator[tuple[int, torch.device]]:
    """Join the other processes, and leave them in order at the end; yields this process's rank and device.

    On GPUs the group's backend is ``cpu:gloo,cuda:nccl``, which handles CPU tensors, too. One process alone needs no
    group.

    Args:
        backend: ``"gloo"``, ``"nccl"``, or ``None`` for NCCL on GPUs and gloo elsewhere.
        timeout_minutes: how long collectives wait for other processes.
        facts: is called once the processes have met, before anything else depends on them.

    Raises:
        ConfigError: the facts, or the versions of gptpar or torch, differ between processes.
        GptparError: the environment is wrong, the backend needs GPUs, or the processes did not meet.
    """
    rank, place, world_size = world_from_environment()
    if backend == "nccl" and not torch.cuda.is_available():
        raise GptparError("--distributed-backend nccl needs GPUs and torch sees none here: use gloo, or leave it out.")
    on_gpu = torch.cuda.is_available() and backend != "gloo"
    device = torch.device("cuda", place % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if world_size == 1:
        yield rank, device
        return
    _meet("cpu:gloo,cuda:nccl" if on_gpu else "gloo", datetime.timedelta(minutes=timeout_minutes))
    try:
        require_same_start(facts())
        yield rank, device
        dist.barrier()
    finally:
        dist.destroy_process_group()


def require_same_start(facts: Mapping[str, str]) -> None:
    """Check that all processes run the same code, and start from the same facts; all call this together.

    Raises:
        ConfigError: on every process: the facts, or the versions of gptpar or torch, differ.
    """
    code = {"the hash of gptpar's source code": source_hash(), "torch's version": torch.__version__}
    require_same({**code, **facts}, "give the processes of all machines the same.")


def join_world(timeout_minutes: float, backend: str | None = None) -> tuple[int, torch.device]:
    """Join the other processes, unless the caller has already; returns this process's rank and device.

    Args:
        timeout_minutes: how long collectives wait for other processes.
        backend: torch's name of one; default: NCCL for tensors on GPUs, gloo for others.

    Raises:
        GptparError: the environment is wrong, or the processes did not meet.
    """
    if not dist.is_initialized():
        rank, place, world_size = world_from_environment()
        on_gpu = torch.cuda.is_available() and backend != "gloo"
        device = _device_of(place) if on_gpu else torch.device("cpu")
        if world_size > 1:
            backend = backend or ("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
            _meet(backend, datetime.timedelta(minutes=timeout_minutes))
        return rank, device
    on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend_config()
    return dist.get_rank(), _device_of(local_rank(os.environ)) if on_gpu else torch.device("cpu")


def _device_of(place: int | None) -> torch.device:
    """This process's GPU, made the current one.

    Args:
        place: this process's number on its machine; ``None``: keep the current GPU.
    """
    current = torch.cuda.current_device() if place is None else place % torch.cuda.device_count()
    torch.cuda.set_device(current)
    return torch.device("cuda", current)


def _meet(backend: str, timeout: datetime.timedelta) -> None:
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        if os.environ.get(SHARES_NO_STORE) == "1" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # torchrun with --master-addr shares its store all the same; there all machines count each restart.
            store = dist.PrefixStore(f"start{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        is_misnamed = world_size > place_on_machine()[1] and means_loopback(os.uname().nodename)
        if is_misnamed and (interface := outward_interface()) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo would tell others the address of the name
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except RuntimeError as error:  # also the base class of torch's errors
        where = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise NotMetError(
            f"the processes did not meet at {where} ({first_line(error)}): see that rank 0 runs there and can "
            "be reached by all, and that no other program has this port (else choose another MASTER_PORT). Where a "
            "machine has several networks, or its own name means 127.0.1.1, set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the interface that the others reach."
        ) from error
