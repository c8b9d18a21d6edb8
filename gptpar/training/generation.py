"""Continue a prompt with a trained model: the model of a checkpoint, and token after token from its logits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gptpar.checkpoint import Manifest, find_checkpoints, read_manifest, read_tensors
from gptpar.checkpoint.foreign import why_not_to_load
from gptpar.config import ModelConfig
from gptpar.errors import CheckpointError
from gptpar.model.gpt import gpt_model
from gptpar.pipeline.stage import Stage, memory_for
from gptpar.training.stored import StoredModel, stored_model


def load_model(
    folder: Path, device: torch.device, dtype: torch.dtype, iteration: int | None = None
) -> tuple[Stage, StoredModel]:
    """The model of a run folder's newest whole checkpoint (or of one iteration), ready to give logits.

    Raises:
        CheckpointError: none that can be read.
    """
    if problem := why_not_to_load(folder):
        raise CheckpointError(problem)
    found = [path for number, path in find_checkpoints(folder) if iteration in (None, number)]
    if not found:
        what = "checkpoint" if iteration is None else f"checkpoint of iteration {iteration}"
        where = f"in {folder}" if folder.is_dir() else f"in {folder}, which does not exist"
        raise CheckpointError(f"there is no {what} {where}: name the --save folder of a run")
    problems: list[str] = []
    for path in found:
        try:
            manifest = read_manifest(path)
            stored = stored_model(path, manifest.meta)
            _require_its_tensors(path, manifest, stored.model)
            stage = Stage(gpt_model(stored.model).specs)
            shapes = {name: tuple(parameter.shape) for name, parameter in stage.global_parameters().items()}
            _require_shapes(path, manifest, shapes)
            weights = read_tensors(path, [f"weights/{name}" for name in shapes])
        except CheckpointError as error:
            problems.append(str(error))
            print(f"skipped a checkpoint: {error}", file=sys.stderr)
            continue
        values = {name: weights[f"weights/{name}"].to(device, dtype) for name in shapes}
        stage.place(values | memory_for(stage.buffer_infos(), device))
        return stage.eval().requires_grad_(False), stored
    raise CheckpointError(f"no checkpoint in {folder} can be read:\n" + "\n".join(problems))


def _require_its_tensors(path: Path, manifest: Manifest, model: ModelConfig) -> None:
    """A model larger than its checkpoint is not built: who wrote the sizes may have written any.

    Raises:
        CheckpointError: a size that no tensor has.
    """
    largest = max((size for entry in manifest.tensors.values() for size in entry.shape), default=0)
    limits = {"num_layers": len(manifest.tensors)} | dict.fromkeys(
        ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"), largest
    )
    for name, limit in (limits | {"padded_vocab_size": largest}).items():
        if getattr(model, name) > limit:
            raise CheckpointError(
                f"the meta of {path} says {name} {getattr(model, name):,}, but it holds {len(manifest.tensors):,} "
                f"tensors, none longer than {largest:,}; take another checkpoint with --ckpt-step N"
            )


def _require_shapes(path: Path, manifest: Manifest, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        entry = manifest.tensors.get(f"weights/{name}")
        if entry is not None and entry.shape != shape:
            raise CheckpointError(
                f"tensor 'weights/{name}' of {path} is {list(entry.shape)}, and {list(shape)} in the model that its "
                "meta describes; take another checkpoint with --ckpt-step N"
            )


@torch.no_grad()
def sample(
    stage: Stage,
    prompt: list[int],
    *,
    num_tokens: int,
    context: int,
    vocab_size: int,
    temperature: float = 1.0,
    top_k: int = 0,
    stop_at: int | None = None,
    seed: int = 1234,
) -> Iterator[int]:
    """Sample token after token, each from the whole context computed anew.

    Args:
        prompt: ids to continue; must not be empty.
        context: the model's sequence length; older tokens are forgotten.
        vocab_size: padding rows of the output beyond this are never chosen.
        temperature: 0 takes the likeliest token.
        top_k: choose among the k likeliest only; 0 among all.
        stop_at: end after this id.
    """
    device = next(stage.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(num_tokens):
        window = torch.tensor([tokens[-context:]], device=device)
        fields: dict[str, Any] = {"seq_length": window.shape[1]}
        logits = stage(window, fields)[-1, :vocab_size].float().cpu()
        if temperature < torch.finfo(logits.dtype).tiny:  # nothing to divide by: the limit of ever lower ones
            choice = int(logits.argmax())
        else:
            logits = (logits - logits.max()) / temperature  # at most 0, so that no temperature overflows
            if top_k:
                logits[logits < logits.topk(min(top_k, vocab_size)).values[-1]] = -torch.inf
            choice = int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
        yield choice
        tokens.append(choice)
        if choice == stop_at:
            return
