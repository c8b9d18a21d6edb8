"""Reads Megatron checkpoints with one file for each tensor rank and each stage, or each layer.

    iter_0000010/mp_rank_TT[_PPP]/model_optim_rng.pt       Megatron-LM, tensor rank TT, pipeline rank PPP
    global_step10/mp_rank_TT_model_states.pt               Megatron-DeepSpeed without a pipeline, ZeRO up to stage 2
    global_step10/layer_LL-model_TT-model_states.pt        Megatron-DeepSpeed with a pipeline

In the last two formats DeepSpeed also saves the optimizer's state, with fp32 weights; see ``zero_states.py``.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from gptpar.errors import CheckpointError
from gptpar.exchange.files.safe_pickle import load_torch_file
from gptpar.exchange.megatron.arguments import NEEDED
from gptpar.exchange.megatron.found import WEIGHTS, Found, Parts, RankPart
from gptpar.exchange.megatron.names import our_name
from gptpar.exchange.megatron.zero_states import open_zero_states

FILES = (
    ("*/*.pt", r"mp_rank_(?P<tensor>\d+)(_(?P<place>\d+))?/model_optim_rng\.pt"),
    ("layer_*.pt", r"layer_(?P<place>\d+)-model_(?P<tensor>\d+)-model_states\.pt"),
    ("mp_rank_*.pt", r"mp_rank_(?P<tensor>\d+)(?P<place>)_model_states\.pt"),
)
"""Glob and name of each format's files of weights. The first format with any file is taken."""


STATES = "mp_rank_00_model_states.pt"
"""DeepSpeed's file of arguments and counters."""


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
            weights.setdefault(name, []).append(RankPart(tuple(tensor.shape), lambda tensor=tensor: [tensor]))  # type: ignore[misc]
    if arguments is None:
        arguments, beside = model_states(path)
    states = path / STATES
    file = states if states.is_file() else next(iter(ranks.values()))[0]
    given, zero = with_arguments(arguments, file), open_zero_states(path, len(ranks))
    if zero is None:
        return Found(path, given, beside, len(ranks), {WEIGHTS: weights})
    return Found(path, given, beside, len(ranks), zero.states, zero.steps)


def model_states(path: Path) -> tuple[Any, Mapping[str, Any]]:
    """The arguments in a checkpoint folder of DeepSpeed, and the values beside them.

    Raises:
        CheckpointError: the file cannot be read.
    """
    states = path / STATES
    content = load_torch_file(states) if states.is_file() else {}
    return (content.get("args"), {"checkpoint_version": 3.0} | content) if isinstance(content, dict) else (None, {})


def with_arguments(arguments: object, file: Path) -> Namespace:
    """Check that a checkpoint has its run's arguments, and return them.

    Args:
        file: the checkpoint's file that should hold them.

    Raises:
        CheckpointError: it has none.
    """
    if not isinstance(arguments, Namespace):
        needed = ", ".join(f"{name}=..." for name in NEEDED)
        found = "no 'args'" if arguments is None else f"'args' of type {type(arguments).__name__}"
        raise CheckpointError(
            f"{file} holds {found}: the arguments of the run, an argparse.Namespace, describe the model. Load and save "
            "the checkpoint once with the Megatron that made it, or add them by torch.load and torch.save: "
            f"args=argparse.Namespace({needed}), and those whose values are not Megatron's defaults (normalization, "
            "swiglu, position_embedding_type, num_query_groups, ...)"
        )
    return arguments


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
