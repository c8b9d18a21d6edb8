"""Reads the optimizer state of Megatron-DeepSpeed's ZeRO-1 and ZeRO-2: a file for each data rank and model rank.

    global_step10/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt

For each parameter group a file has one flat vector of each state, and says which elements belong to which parameter.
The elements of all data ranks, one rank after the other, are a tensor rank's split of the parameter in row-major order.
Model rank MM is stage * number of tensor ranks + tensor rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gptpar.errors import CheckpointError
from gptpar.exchange.files.safe_pickle import Record, load_torch_file
from gptpar.exchange.megatron.found import MOMENTS, WEIGHTS, Parts, RankPart
from gptpar.exchange.megatron.names import names_in_model, our_name
from gptpar.exchange.megatron.steps import steps_in

_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
KINDS = (WEIGHTS, *MOMENTS)


@dataclass(frozen=True)
class ZeroStates:
    """The states of all parameters by kind, and the number of updates."""

    states: Mapping[str, Parts]
    steps: int


@dataclass
class _Pieces:
    """The elements of one parameter's state on one tensor rank, from its data ranks in order."""

    stage: int
    flat: list[torch.Tensor] = field(default_factory=list)

    def part(self) -> RankPart:
        return RankPart((sum(map(len, self.flat)),), lambda: self.flat)


def open_zero_states(path: Path, num_ranks: int) -> ZeroStates | None:
    """Open the optimizer's files of a checkpoint; tensors stay on the disk.

    Args:
        num_ranks: number of tensor ranks.

    Returns:
        The states; ``None``: there are no such files, or they have another form.

    Raises:
        CheckpointError: a file cannot be read or is damaged, or the files have different numbers of updates.
    """
    pieces: dict[tuple[str, str, int], _Pieces] = {}
    steps = set()
    for model_rank, file in _files(path):
        state = _state(file)
        if state is None:
            return None
        steps.add(steps_in(state["base_optimizer_state"]))
        stage, rank = divmod(model_rank, num_ranks)
        for kind, name, values in _slices(state, file):
            one = pieces.setdefault((kind, name, rank), _Pieces(stage))
            if one.stage == stage:  # a tied embedding is in the last stage, too
                one.flat.append(values)
    if len(steps) > 1:
        raise CheckpointError(f"the optimizer files in {path} are of different steps")
    if not steps or (count := steps.pop()) is None:
        return None
    return ZeroStates(_parts(pieces), count)


def _files(path: Path) -> Iterator[tuple[int, Path]]:
    """Model rank and file, in the order of model ranks, then of data ranks."""
    named = ((_FILE.fullmatch(file.name), file) for file in path.glob("*zero_pp_rank_*_optim_states.pt"))
    files = sorted((int(found[2]), int(found[1]), file) for found, file in named if found)
    return ((model_rank, file) for model_rank, _, file in files)


def _parts(pieces: Mapping[tuple[str, str, int], _Pieces]) -> dict[str, Parts]:
    """Splits by kind and our name, in the order of tensor ranks."""
    ours = {name: our_name(theirs) for name, theirs in names_in_model({name for _, name, _ in pieces}).items()}
    states: dict[str, Parts] = {kind: {} for kind in KINDS}
    for kind, name, rank in sorted(pieces, key=lambda place: place[2]):
        states[kind].setdefault(ours[name], []).append(pieces[kind, name, rank].part())
    return states


def _state(file: Path) -> dict[str, Any] | None:
    """The optimizer's state in a file; ``None`` unless ZeRO-1 or ZeRO-2 saved it with names of parameters."""
    content = load_torch_file(file)
    state = content.get("optimizer_state_dict") if isinstance(content, dict) else None
    wanted = {"base_optimizer_state": dict, "single_partition_of_fp32_groups": list, "param_slice_mappings": list}
    is_known = isinstance(state, dict) and all(isinstance(state.get(name), kind) for name, kind in wanted.items())
    return state if is_known else None


def _slices(state: dict[str, Any], file: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Kind, parameter's name and elements, for each state of each parameter in a file.

    Raises:
        CheckpointError: the file lacks a vector or elements that it names.
    """
    try:
        groups = state["base_optimizer_state"]["state"]
        for number, (weights, places) in enumerate(
            zip(state["single_partition_of_fp32_groups"], state["param_slice_mappings"], strict=True)
        ):
            vectors = {WEIGHTS: weights, **{moment: groups[number][moment] for moment in MOMENTS}}
            for name, place in places.items():
                start, count = _place(place)
                for kind, vector in vectors.items():
                    if not isinstance(vector, torch.Tensor) or start + count > vector.numel():
                        raise ValueError(f"{kind} of group {number} ends before {name!r}")
                    yield kind, name, vector.view(-1)[start : start + count]
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is not an optimizer's state as DeepSpeed saves it: {str(error)[:200]}") from None


def _place(place: object) -> tuple[int, int]:
    given = vars(place) if isinstance(place, Record) else {}
    start, count = given.get("start"), given.get("numel")
    if type(start) is not int or type(count) is not int or start < 0 or count < 0:
        raise ValueError("a place in a vector is no pair of whole numbers")
    return start, count
