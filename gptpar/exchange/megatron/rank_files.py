"""Reads Megatron checkpoints with one file for each tensor rank and each stage, or each layer.

    iter_0000010/mp_rank_TT[_PPP]/model_optim_rng.pt       Megatron-LM, tensor rank TT, pipeline rank PPP
    global_step10/mp_rank_TT_model_states.pt               Megatron-DeepSpeed without a pipeline, ZeRO up to stage 2
    global_step10/layer_LL-model_TT-model_states.pt        Megatron-DeepSpeed with a pipeline

In the last two formats DeepSpeed also saves the optimizer's state, with fp32 weights: under ZeRO-1 and ZeRO-2 a file
for each data rank D and model rank MM, which is stage * number of tensor ranks + tensor rank.

    global_step10/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt

For each parameter group a file has one flat vector of each state, and says which elements belong to which parameter.
The elements of all data ranks, one rank after the other, are a tensor rank's split of the parameter in row-major order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptpar.errors import CheckpointError
from gptpar.exchange.files.safe_pickle import Record, load_torch_file
from gptpar.exchange.megatron.found import MOMENTS, WEIGHTS, Found, Parts, RankPart, steps_in, with_arguments
from gptpar.exchange.megatron.names import names_in_model, our_name

FILES = (
    ("*/*.pt", r"mp_rank_(?P<tensor>\d+)(_(?P<place>\d+))?/model_optim_rng\.pt"),
    ("layer_*.pt", r"layer_(?P<place>\d+)-model_(?P<tensor>\d+)-model_states\.pt"),
    ("mp_rank_*.pt", r"mp_rank_(?P<tensor>\d+)(?P<place>)_model_states\.pt"),
)
"""Glob and name of each format's files of weights. The first format with any file is taken."""

STATES = "mp_rank_00_model_states.pt"
"""DeepSpeed's file of arguments and counters."""

_ZERO_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")


def open_rank_files(path: Path) -> Found:
    """Open the files of one checkpoint.

    Raises:
        CheckpointError: a rank's file is missing, cannot be read, or holds no model.
    """
    ranks = _files(path)
    arguments: object = None
    beside: Mapping[str, Any] = {}
    weights: Parts = {}
    for files in ranks.values():
        counted = 0
        of_rank: dict[str, torch.Tensor] = {}  # the tied head is a second copy, in the last stage
        for content, file in ((load_torch_file(file), file) for file in files):
            if not isinstance(content, dict):
                raise CheckpointError(f"{file} holds no state of a model")
            if "args" in content:
                arguments, beside = content["args"], content
            for one in _models_in(content):
                found = {our_name(name, counted): tensor for name, tensor in _flat(one)}
                of_rank |= found
                counted += len({name.split(".")[1] for name in found if name.startswith("layers.")})
        for name, tensor in of_rank.items():
            weights.setdefault(name, []).append(RankPart(tuple(tensor.shape), partial(list, [tensor])))
    if arguments is None:
        arguments, beside = model_states(path)
    file = path / STATES if (path / STATES).is_file() else next(iter(ranks.values()))[0]
    given = with_arguments(arguments, file)
    states, steps = open_zero_states(path, len(ranks)) or ({WEIGHTS: weights}, None)
    return Found(path, given, beside, len(ranks), states, steps)


def model_states(path: Path) -> tuple[Any, Mapping[str, Any]]:
    """The arguments in a checkpoint folder of DeepSpeed, and the values beside them.

    Raises:
        CheckpointError: the file cannot be read.
    """
    states = path / STATES
    content = load_torch_file(states) if states.is_file() else {}
    return (content.get("args"), {"checkpoint_version": 3.0} | content) if isinstance(content, dict) else (None, {})


def _files(path: Path) -> dict[int, list[Path]]:
    """Each tensor rank's files in the order of the forward pass.

    Raises:
        CheckpointError: the folder has no such files, or a rank's file is missing.
    """
    forms = ({file: re.fullmatch(name, str(file.relative_to(path))) for file in path.glob(how)} for how, name in FILES)
    form = next((form for form in forms if any(form.values())), {})
    found = {(int(name["tensor"]), int(name["place"] or 0)): file for file, name in form.items() if name}
    tensors, places = ({place[i] for place in found} for i in (0, 1))
    if not found or len(found) != len(tensors) * len(places):
        raise CheckpointError(
            f"{path} has {len(found)} files of weights, of {len(tensors)} tensor-parallel ranks and {len(places)} "
            "stages or layers: some are missing, or it is no checkpoint of Megatron-LM's legacy format or of "
            "Megatron-DeepSpeed"
        )
    return {rank: [found[rank, place] for place in sorted(places)] for rank in sorted(tensors)}


def _models_in(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The state of one model, or of the one layer that a file of DeepSpeed's pipelines holds, named as in a model.

    Raises:
        CheckpointError: the file has several virtual stages; the order of their layers alternates between files.
    """
    if "model0" in content:
        raise CheckpointError("its stages have several virtual stages each; save it once without them")
    state = content.get("model", content.get("module", content))
    if not isinstance(state, dict):
        return
    names = {str(name) for name in state}
    if names <= {"weight", "bias"}:
        yield {"final_norm": state}
    elif any(name.startswith(("self_attention.", "attention.")) for name in names):
        yield {"layers.0": state}
    else:
        yield state


def _flat(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of nested dictionaries, the form in which Megatron-LM's older models save themselves."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, torch.Tensor) and not name.endswith("_extra_state"):
            yield name, value


def open_zero_states(path: Path, num_ranks: int) -> tuple[dict[str, Parts], int] | None:
    """Open the optimizer's files of a checkpoint; tensors stay on the disk.

    Args:
        num_ranks: number of tensor ranks.

    Returns:
        The states of all parameters by kind, and the number of updates; ``None``: there are no such files, or they
        have another form.

    Raises:
        CheckpointError: a file cannot be read or is damaged, or the files have different numbers of updates.
    """
    places: dict[tuple[str, str, int], tuple[int, list[torch.Tensor]]] = {}
    steps = set()
    for model_rank, _, file in _zero_files(path):
        state = _state(file)
        if state is None:
            return None
        steps.add(steps_in(state["base_optimizer_state"]))
        stage, rank = divmod(model_rank, num_ranks)
        for kind, name, values in _slices(state, file):
            first, flat = places.setdefault((kind, name, rank), (stage, []))
            if first == stage:  # a tied embedding is in the last stage, too
                flat.append(values)
    if len(steps) > 1:
        raise CheckpointError(f"the optimizer files in {path} are of different steps")
    if not steps or (count := steps.pop()) is None:
        return None
    ours = {name: our_name(theirs) for name, theirs in names_in_model({name for _, name, _ in places}).items()}
    states: dict[str, Parts] = {kind: {} for kind in (WEIGHTS, *MOMENTS)}
    for kind, name, rank in sorted(places, key=lambda place: place[2]):
        flat = places[kind, name, rank][1]
        states[kind].setdefault(ours[name], []).append(RankPart((sum(map(len, flat)),), partial(list, flat)))
    return states, count


def _zero_files(path: Path) -> list[tuple[int, int, Path]]:
    """Model rank, data rank and file of each file of the optimizer, in this order."""
    named = ((_ZERO_FILE.fullmatch(file.name), file) for file in path.glob("*zero_pp_rank_*_optim_states.pt"))
    return sorted((int(found[2]), int(found[1]), file) for found, file in named if found)


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
