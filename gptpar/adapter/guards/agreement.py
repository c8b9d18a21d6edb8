"""Checks that all processes have the same model, and have run the same units in a step.

Collectives match by their order alone, so that a difference would exchange parts of different parameters.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from gptpar.errors import GptparError, ModelError
from gptpar.topology.agreement import require_same
from gptpar.topology.groups import Topology

MODULUS = 2**20
"""Fingerprints are below this, so that sums of their squares over processes are exact in fp64."""

FINE, OTHER_UNITS, LATE = 0.0, 1.0, 2.0

Passes = Sequence[Sequence[str]]

REMEDY = (
    "All processes have to call the same modules in the same order within a step; else make them one unit by naming "
    'the class of a module around them in {"gptpar": {"units": [...]}}, or use ZeRO stage 2 or lower without offload.'
)


class _Did(NamedTuple):
    """What a process did in a step; see :meth:`Agreement.evidence`."""

    passes: Passes = ()
    late: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()


class Agreement:
    """Compares what processes did in a step, by three numbers in the all-reduce of the gradient's norm.

    If they differ, the step changes nothing, because the device makes its norm infinite. Every process raises the error
    later, when it reads the numbers.

    Args:
        topology: the processes.
        ordered: whether parameters are gathered in the order of the calls.
    """

    def __init__(self, topology: Topology, *, ordered: bool):
        self._topology, self._ordered = topology, ordered
        self._did: _Did = _Did()

    def evidence(
        self, passes: Passes, late: Collection[str], frozen: Collection[str], like: torch.Tensor
    ) -> torch.Tensor:
        """[3] this process's addends to the three numbers.

        Args:
            passes: the units called in each forward pass of the step.
            late: parameters whose gradient was formed after their unit's gradient had been handed on.
            frozen: parameters that are frozen in this step; pipeline stages have others.
            like: a tensor with the device and the dtype (fp64) of the result.
        """
        shared = sorted(frozen) if self._topology.mesh.pipeline == 1 else []
        self._did = _Did([list(one) for one in passes], tuple(sorted(late)), tuple(shared))
        text = "\n".join("\t".join(one) for one in ([*passes] if self._ordered else []) + [shared])
        fingerprint = zlib.crc32(text.encode()) % MODULUS
        numbers = [fingerprint, fingerprint**2, len(self._did.late)]
        return torch.tensor(numbers, dtype=like.dtype).to(like.device, non_blocking=True)

    def judge(self, norm: torch.Tensor, sums: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(the norm, or infinity if the step must not be taken; the verdict, for :meth:`error`), on the device."""
        differ = sums[0].square() != sums[1] * self._topology.mesh.world_size
        verdict = torch.where(differ, OTHER_UNITS, torch.where(sums[2] > 0, LATE, FINE))
        return torch.where(verdict == FINE, norm, float("inf")), verdict

    def error(self, verdict: float, step: int) -> GptparError:
        """The error for a verdict, with the same sentence on all processes; all call this together."""
        everyone = self._topology.of_all(self._did)
        frozen = Counter(name for one in everyone for name in one.frozen)
        if differing := [name for name, count in frozen.items() if count < len(everyone)]:
            return GptparError(
                f"step {step} was not taken: requires_grad of {len(differing)} parameter(s), {min(differing)} among "
                "them, is not the same on all processes: freeze the same parameters on each."
            )
        if verdict == LATE:
            names = sorted({name for one in everyone for name in one.late})
            return GptparError(
                f"step {step} was not taken: {', '.join(names)} got a gradient after the unit's gradient had been "
                "handed on as final, because the backward pass used it more often than in earlier steps. Nothing was "
                "changed, and from now on the engine expects it: repeat the step."
            )
        return GptparError(
            f"step {step} was not taken: processes ran different units, so that they gathered each other's parameters "
            f"in another order. {_first_difference([one.passes for one in everyone])} {REMEDY}"
        )


def _first_difference(passes: Sequence[Passes]) -> str:
    flat = [[name for one in each for name in one] for each in passes]
    for place in range(max(map(len, flat))):
        called = [names[place] if place < len(names) else None for names in flat]
        if len(set(called)) > 1:
            calls = ", ".join(
                f"rank {rank} " + ("ended" if name is None else f"called {name or 'the model'}")
                for rank, name in enumerate(called)
            )
            return f"At call {place + 1}, {calls}."
    return "The calls are the same, but divided differently over forward passes."


def require_same_model(
    model: nn.Module, groups: Sequence[dict[str, Any]], processes: dist.ProcessGroup | None = None
) -> None:
    """Check that all processes train the same parameters with the same hyperparameters; all call this together.

    Args:
        groups: of the optimizer.
        processes: those that hold the same parameters; ``None``: all.

    Raises:
        ModelError: on each of them: parameters differ in name, order, shape, dtype or ``requires_grad``, or groups in
            their parameters or in a plain value.
    """
    facts, names = {}, {}
    for number, (name, p) in enumerate(model.named_parameters()):
        trained = "trained" if p.requires_grad else "frozen"
        facts[f"parameter {number}"] = f"{name} ({list(p.shape)}, {str(p.dtype).removeprefix('torch.')}, {trained})"
        names[p] = str(number)
    for number, group in enumerate(groups):
        plain = {key: value for key, value in group.items() if isinstance(value, bool | int | float | str | tuple)}
        facts |= {f"{key} of parameter group {number}": str(value) for key, value in plain.items()}
        facts[f"parameter group {number}"] = "parameters " + " ".join(names[p] for p in group["params"])
    require_same(facts, "all processes have to build the same model and optimizer.", processes, ModelError)
