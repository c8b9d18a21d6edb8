"""Makes a checkpoint of ours from one of Megatron's, tensor by tensor.

Since version 2 of Megatron's checkpoints QKV rows are ordered by group, as ours are. A tensor rank there has the same
split of a parameter as our parameter's declared placement gives it here. So splits are joined along the declared dim.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint.patches import ParameterView
from gptpar.checkpoint.streamed import StreamedCheckpoint, StreamedPart
from gptpar.config import ModelConfig, TokenizerConfig
from gptpar.errors import CheckpointError
from gptpar.exchange.files.safe_pickle import is_whole
from gptpar.exchange.files.safetensors_file import NAME_OF
from gptpar.exchange.foreign_model import MAX_LISTED, Finite, ForeignModel, converted_meta
from gptpar.exchange.megatron.arguments import count_in, model_of
from gptpar.exchange.megatron.found import WEIGHTS, Found, RankPart
from gptpar.exchange.megatron.rank_files import open_rank_files
from gptpar.exchange.megatron.torch_dist import open_torch_dist
from gptpar.exchange.megatron.universal import open_universal
from gptpar.model.gpt import gpt_model
from gptpar.optim.loss_scale import LossScale
from gptpar.optim.schedule import Schedule
from gptpar.pipeline.stage import Stage
from gptpar.topology.mesh import TENSOR
from gptpar.topology.placement import ParameterInfo

FORMATS: Sequence[tuple[str, Callable[[Path], Found]]] = (
    (".metadata", open_torch_dist),
    ("common.pt", open_torch_dist),
    ("zero/", open_universal),
)
"""A name in a checkpoint's folder, and what opens the checkpoint; the first that is there counts."""

MAX_GROWTH = 16
"""Bytes of our checkpoint for each byte of Megatron's; weights of 8 bits grow to 4 times their bytes."""
_CHECKPOINT = r"(?:iter_|global_step)(\d{1,18})(_universal)?"


def _write(found: Found, infos: Mapping[str, ParameterInfo], file: StreamedCheckpoint) -> None:
    """Write all tensors of our checkpoint, in the order in which Megatron's files are read fastest.

    A parameter of ours, or an optimizer state of it, is fp64 if Megatron's tensor is fp64, else fp32.

    Args:
        infos: our global name -> shape and placement.

    Raises:
        CheckpointError: values are not finite, or the disk refuses.
    """
    finite = Finite()
    for kind, name in ((kind, name) for kind, parts in found.states.items() for name in parts if name in infos):
        splits = [part.read() for part in found.states[kind][name]]
        tensors = [tensor for one in splits for tensor in one]
        if not all(tensor.dtype in NAME_OF and is_whole(tensor) for tensor in tensors):
            raise CheckpointError(
                f"{kind} of {name!r} in {found.path} is no plain tensor of {', '.join(map(str, NAME_OF))}"
            )
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
        info = infos[name]
        file.write(f"{kind}/{name}", tuple(info.shape), dtype, list(_parts(info, splits)), finite.look)
    finite.require(found.path)


def _parts(info: ParameterInfo, splits: Sequence[Sequence[torch.Tensor]]) -> Iterator[StreamedPart]:
    """Each rank's split at its place in the parameter; the first one, where all ranks have all of it."""
    split = info.placement.value.get(TENSOR)
    if split is None or len(splits) == 1:
        yield StreamedPart(ParameterView(info.shape, lambda whole: whole), splits[0])
        return
    dim, start = split.dim, 0
    row = prod(info.shape) // info.shape[dim]
    for one in splits:
        size = sum(tensor.numel() for tensor in one) // row
        yield StreamedPart(ParameterView(info.shape, partial(torch.narrow, dim=dim, start=start, length=size)), one)
        start += size


def megatron_model(folder: Path) -> ForeignModel:
    """Open a checkpoint folder, or the newest in a folder of checkpoints; tensors are not read yet.

    Raises:
        CheckpointError: with what is wrong, or what cannot be read.
    """
    path = _newest(folder)
    found = next((read for name, read in FORMATS if any(path.glob(name))), open_rank_files)(path)
    version = found.beside.get("checkpoint_version", 0.0)
    if type(version) not in (int, float) or version < 2:
        number = version if type(version) in (int, float) else "unknown"
        raise CheckpointError(
            f"{path} is of version {number} of Megatron's checkpoints, whose QKV rows are in another order; "
            "load and save it with a newer Megatron-LM once"
        )
    if not found.states[WEIGHTS].get("embedding.weight"):
        raise CheckpointError(f"{path} has no word embedding: a file of it is missing")
    elements = sum(map(_numel, found.states[WEIGHTS].get("embedding.weight", ())))
    rows = elements // (count_in(vars(found.arguments), "hidden_size") or 1)
    model = model_of(found.arguments, rows, path)
    infos = Stage(gpt_model(model).specs).infos()
    _require_proportion(path, 4 * len(found.states) * sum(info.shape.numel() for info in infos.values()))
    problems = [problem for kind in found.states for problem in _mismatches(found, kind, infos, model.tied)]
    if problems:
        listed = "\n".join(problems[:MAX_LISTED])
        raise CheckpointError(f"the weights in {path} are not those of its arguments:\n{listed}")
    return ForeignModel(_meta(found, model), partial(_write, found, infos))


def _require_proportion(path: Path, num_bytes: int) -> None:
    """Refuse a folder far smaller than its checkpoint: names that share bytes, and padding, could fill any disk.

    Args:
        num_bytes: size of the checkpoint to be made.

    Raises:
        CheckpointError: the folder has far fewer bytes.
    """
    there = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if num_bytes > MAX_GROWTH * there:
        raise CheckpointError(
            f"{path} has {there:,} bytes, and its arguments describe {num_bytes:,} bytes of tensors in fp32: its names "
            "share bytes, or its arguments are not those of its weights"
        )


def _newest(folder: Path) -> Path:
    """The newest checkpoint in a folder of checkpoints; else the folder itself.

    Of a checkpoint and its universal form the universal one is taken.
    """
    inside = [path for path in folder.iterdir() if path.is_dir()]
    found = [(re.fullmatch(_CHECKPOINT, path.name), path) for path in inside]
    numbered = [(int(name[1]), name[2] or "", path) for name, path in found if name]
    release = [path for path in inside if path.name == "release"]
    return max(numbered)[2] if numbered else [*release, folder][0]


def _meta(found: Found, model: ModelConfig) -> dict[str, Any]:
    """The meta of the checkpoint that is made; the number of token ids without padding is not always known.

    Raises:
        CheckpointError: the run could go on, and its iteration or its samples are not there.
    """
    info = found.beside.get("universal_checkpoint_info")
    size = count_in(info, "original_vocab_size") if isinstance(info, dict) else None
    size = size or count_in(vars(found.arguments), "vocab_size")
    known = size if size and size <= model.padded_vocab_size else None
    tokenizer = TokenizerConfig(vocab_size=known or model.padded_vocab_size)
    progress = {} if found.steps is None else progress_meta(found, model.seq_length)
    return converted_meta(model, tokenizer, "megatron", vocab_size=known) | progress


def _mismatches(found: Found, kind: str, infos: Mapping[str, ParameterInfo], tied: bool) -> Iterator[str]:
    """A sentence for each tensor that is missing, has no place in the model, or has another number of elements."""
    states, of_kind = found.states[kind], "" if kind == WEIGHTS else f"{kind} of "
    names = states.keys() - ({"output.weight"} if tied else set())
    yield from (f"{of_kind}{name!r} is missing" for name in sorted(infos.keys() - names))
    yield from (f"{of_kind}{name!r} has no place in the model" for name in sorted(names - infos.keys()))
    for name in sorted(names & infos.keys()):
        info, parts = infos[name], states[name]
        split = info.placement.value.get(TENSOR)
        whole = sum(map(_numel, parts)) if split is not None else _numel(parts[0])
        row = 1 if split is None else prod(info.shape) // info.shape[split.dim]
        uneven = any(_numel(part) % row for part in parts)
        if whole != info.shape.numel() or len(parts) != found.num_ranks or uneven:
            sizes = [list(part.shape) for part in parts]
            yield (
                f"{of_kind}{name!r} is {list(info.shape)} in the model, and the {found.num_ranks} ranks have {sizes}"
            )


def _numel(part: RankPart) -> int:
    return torch.Size(part.shape).numel()


def progress_meta(found: Found, seq_length: int) -> dict[str, Any]:
    """The meta that lets a run go on; as ``run/accept.py`` reads it.

    The loss scale of fp16 begins anew.

    Raises:
        CheckpointError: the checkpoint does not say its iteration or its consumed samples.
    """
    given, beside = vars(found.arguments), found.beside
    named = (beside.get(name) for name in ("opt_param_scheduler", "lr_scheduler"))
    scheduler: dict[str, Any] = next((value for value in named if isinstance(value, dict)), {})
    iteration, samples = count_in(beside, "iteration"), count_in(given, "consumed_train_samples")
    if iteration is None or samples is None:
        raise CheckpointError(f"{found.path} does not say its iteration and its consumed_train_samples")
    scheduled = count_in(scheduler, "num_steps")
    return {
        "progress": {
            "iteration": iteration,
            "consumed_samples": samples,
            "scheduled_samples": samples if scheduled is None else scheduled,
            "skipped_iterations": count_in(beside, "skipped_steps") or 0,
            "nan_iterations": 0,
        },
        "optimizer_steps": found.steps,
        "loss_scale": LossScale(1.0, dynamic=False).state(),
        "schedule": dataclasses.asdict(_schedule({**given, **scheduler}, seq_length)),
    }


def _schedule(values: Mapping[str, Any], seq_length: int) -> Schedule:
    """The schedule of a run.

    Args:
        values: the arguments, overridden by the scheduler's state.
    """

    def number(*names: str) -> float:
        found = map(values.get, names)
        return next((value for value in found if isinstance(value, int | float) and not isinstance(value, bool)), 0)

    def word(name: str, default: str) -> str:
        return value if isinstance(value := values.get(name), str) else default

    in_tokens = values.get("lr_decay_tokens") is not None or values.get("lr_warmup_tokens") is not None
    unit, lengths = (seq_length, "tokens") if in_tokens else (1, "steps")
    wsd_tail = number("lr_wsd_decay_samples") or number("lr_wsd_decay_iters") * number("global_batch_size")
    return Schedule(
        max_lr=number("max_lr", "lr"),
        min_lr=number("min_lr"),
        init_lr=number("lr_warmup_init"),
        warmup=number(f"lr_warmup_{lengths}"),
        decay=number(f"lr_decay_{lengths}"),
        style=word("lr_decay_style", "linear"),
        wsd_tail=wsd_tail * unit,
        wsd_style=word("lr_wsd_decay_style", "exponential"),
        start_decay=number("start_wd", "start_weight_decay", "weight_decay"),
        end_decay=number("end_wd", "end_weight_decay", "weight_decay"),
        decay_style=word("wd_incr_style", "constant"),
        total=number("wd_incr_steps") * unit,
        in_tokens=in_tokens,
        decoupled_max=number("decoupled_lr") or None,
        decoupled_min=number("decoupled_min_lr", "min_lr") if number("decoupled_lr") else None,
    )
