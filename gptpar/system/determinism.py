"""Settings under which the same program on the same devices computes the same bits each time.

Torch, cuBLAS and NCCL have kernels whose sums depend on the timing of threads. Here they are replaced by others, or
refused.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gptpar.errors import GptparError

WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS is deterministic; the first is the faster one."""
NCCL_ALGORITHM = "Ring"
"""All of NCCL's collectives have it, and it adds in one order. NVLS adds in the switch, in the order of arrival."""
_ABSENT_IN_TORCH = "does not have a deterministic implementation"


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """A context in which only deterministic kernels run; enter it before the processes meet.

    Raises:
        GptparError: the environment asks for others, or torch has no deterministic kernel for an operation.
    """
    if not wanted:
        yield
        return
    if problems := list(_problems(os.environ)):
        raise GptparError(" ".join(problems))
    import torch._inductor.config  # takes a second to import

    with contextlib.ExitStack() as stack:
        _set_environment(stack, "CUBLAS_WORKSPACE_CONFIG", WORKSPACES[0])
        _set_environment(stack, "NCCL_ALGO", NCCL_ALGORITHM)
        # Memory that is not initialised is never read here, so torch need not fill it.
        _set(stack, torch.utils.deterministic, "fill_uninitialized_memory", False)
        _set(stack, torch.backends.cudnn, "benchmark", False)
        # No choice of kernels by their times. torch sets it with the next line, too, and again after each compilation.
        _set(stack, torch._inductor.config, "deterministic", True)
        stack.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
        torch.use_deterministic_algorithms(True)
        try:
            yield
        except RuntimeError as error:
            if _ABSENT_IN_TORCH not in str(error):
                raise
            raise GptparError(
                f"--deterministic-mode: {str(error).split(_ABSENT_IN_TORCH)[0]}{_ABSENT_IN_TORCH} in torch "
                f"{torch.__version__}: leave the flag out, or the option that needs this operation."
            ) from error


@contextlib.contextmanager
def exact_bf16_sums(wanted: bool) -> Iterator[None]:
    """A context in which parts of a bf16 product's sum are added in fp32; by default cuBLAS may add them in bf16."""
    with contextlib.ExitStack() as stack:
        if wanted:
            _set(stack, torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
        yield


def _problems(environment: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each of the user's settings that is not deterministic."""
    workspace, algorithms = environment.get("CUBLAS_WORKSPACE_CONFIG"), environment.get("NCCL_ALGO", NCCL_ALGORITHM)
    if workspace is not None and workspace not in WORKSPACES:
        yield (
            f"--deterministic-mode: CUBLAS_WORKSPACE_CONFIG is {workspace}, with which cuBLAS is not deterministic: "
            f"set it to {' or '.join(WORKSPACES)}, or unset it."
        )
    if "nvls" in algorithms.lower() and not algorithms.startswith("^"):
        yield (
            f"--deterministic-mode: NCCL_ALGO is {algorithms}, and NVLS adds in the order of arrival: set it to "
            f"{NCCL_ALGORITHM} or ^NVLS,NVLSTree, or unset it."
        )


def _set_environment(stack: contextlib.ExitStack, name: str, value: str) -> None:
    """Set a variable that the user has not set, until the context ends."""
    if name not in os.environ:
        os.environ[name] = value
        stack.callback(os.environ.pop, name, None)


def _set(stack: contextlib.ExitStack, where: Any, name: str, value: object) -> None:
    stack.callback(setattr, where, name, getattr(where, name))
    setattr(where, name, value)
