"""Reads DeepSpeed's universal checkpoints, which hold whole weights and optimizer states of Megatron-DeepSpeed's runs.

    global_step10_universal/mp_rank_00_model_states.pt           arguments, iteration, scheduler
    global_step10_universal/zero/NAME/fp32.pt, exp_avg.pt, ...   a parameter, or a state of it: {"param": tensor}
    global_step10_universal/zero/NAME/step.pt                    updates, where the optimizer counts them by parameter
    global_step10_universal/zero/optimizer_state.pt              else here, in the parameter groups

NAME is the parameter's name in the trained module. In a pipeline it begins with the place of its layer among all
layers. These checkpoints leave out the padding of the vocabulary. Rows of zeros replace it here, as in DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gptpar.errors import CheckpointError
from gptpar.exchange.files.safe_pickle import load_torch_file
from gptpar.exchange.megatron.arguments import count_in
from gptpar.exchange.megatron.found import MOMENTS, WEIGHTS, Found, Parts, RankPart, steps_in, steps_of, with_arguments
from gptpar.exchange.megatron.names import names_in_model, our_name
from gptpar.exchange.megatron.rank_files import STATES, model_states

FOLDER = "zero"
OF_VOCABULARY = ("embedding.weight", "output.weight")


def open_universal(path: Path) -> Found:
    """Open one checkpoint; tensors are not read yet.

    Raises:
        CheckpointError: with what is wrong, or what cannot be read.
    """
    given, beside = model_states(path)
    arguments = with_arguments(given, path / STATES)
    folders = sorted(one for one in (path / FOLDER).iterdir() if one.is_dir())
    names = names_in_model({one.name for one in folders})
    rows = count_in(vars(arguments), "padded_vocab_size")
    states: dict[str, Parts] = {}
    for one in folders:
        ours = our_name(names[one.name])
        padded = rows if ours in OF_VOCABULARY else None
        for kind, name in ((WEIGHTS, "fp32"), *((moment, moment) for moment in MOMENTS)):
            if (file := one / f"{name}.pt").is_file():
                states.setdefault(kind, {})[ours] = [_part(file, padded)]
    steps = _steps(path / FOLDER, folders)
    if steps is None or not all(moment in states for moment in MOMENTS):
        return Found(path, arguments, beside, 1, {WEIGHTS: states.get(WEIGHTS, {})})
    return Found(path, arguments, beside, 1, states, steps)


def _part(file: Path, rows: int | None) -> RankPart:
    """The tensor of a file, padded with rows of zeros.

    Args:
        rows: rows with padding; ``None``: the tensor has none.

    Raises:
        CheckpointError: the file has no tensor.
    """
    shape = tuple(_tensor(file).shape)
    if rows is not None and shape and shape[0] < rows:
        shape = (rows, *shape[1:])
    return RankPart(shape, partial(_padded, file, shape))


def _padded(file: Path, shape: tuple[int, ...]) -> list[torch.Tensor]:
    tensor = _tensor(file)
    if tuple(tensor.shape) == shape:
        return [tensor]
    return [tensor, tensor.new_zeros(shape[0] - len(tensor), *shape[1:])]


def _tensor(file: Path) -> torch.Tensor:
    content = load_torch_file(file)
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{file} holds no tensor named 'param'")
    return tensor


def _steps(zero: Path, folders: Iterable[Path]) -> int | None:
    """The number of updates; ``None``: the checkpoint does not say it.

    Raises:
        CheckpointError: parameters have different numbers of updates.
    """
    counts = {_step(file) for one in folders if (file := one / "step.pt").is_file()}
    if len(counts) > 1:
        raise CheckpointError(
            f"parameters in {zero} have seen {', '.join(map(str, sorted(counts)))} updates; gptpar counts them for all "
            "parameters together"
        )
    if counts:
        return counts.pop()
    file = zero / "optimizer_state.pt"
    return steps_in(load_torch_file(file)) if file.is_file() else None


def _step(file: Path) -> int:
    content: Any = load_torch_file(file)
    if (steps := steps_of(content)) is None:
        raise CheckpointError(f"{file} holds no number of steps")
    return steps
