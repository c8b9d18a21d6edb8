"""Takes up moments from a checkpoint that keeps them in another number format than the run.

To a wider format nothing is lost; to a narrower one, each moment is rounded to nearest once. A first moment in 8 bits
is relative to its second one, so that both are read together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from gptpar.checkpoint import Manifest, read_tensors
from gptpar.optim.adam_update import STATES
from gptpar.optim.rounded_states import BF16, FP8, as_wide, in_formats
from gptpar.topology.tensor_parts import TensorParts, kind_of

_NAMES = {torch.float32: "fp32", BF16: "bf16", FP8: "fp8"}
_NEAREST = 0x8000
"""The draw that rounds to nearest."""


def may_differ(name: str, stored: torch.dtype, here: torch.dtype) -> bool:
    """Whether a tensor is a moment that may have these number formats in the checkpoint and in the run."""
    return kind_of(name) in STATES and {stored, here} <= _NAMES.keys()


def take_up_moments(path: Path, manifest: Manifest, targets: Mapping[str, TensorParts]) -> list[str]:
    """Convert what a cast cannot: moments in 8 bits on either side.

    Args:
        path, manifest: the checkpoint that was loaded into the targets.
        targets: tensors by name, as in a checkpoint.

    Returns:
        A sentence about each moment in another number format.

    Raises:
        DamagedCheckpoint: a piece of a moment is damaged.
    """
    found: set[tuple[int, torch.dtype, torch.dtype]] = set()
    for name in _with_both(manifest, targets):
        both = [f"{kind}/{name}" for kind in STATES]
        stored = [manifest.tensors[one].dtype for one in both]
        here = [targets[one].dtype if one in targets else manifest.tensors[one].dtype for one in both]
        found.update(one for one in zip(range(len(STATES)), stored, here, strict=True) if one[1] != one[2])
        if stored != here and FP8 in (*stored, *here):
            _convert(path, manifest, both, here, targets)
    return [_sentence(STATES[place], was, now) for place, was, now in sorted(found, key=lambda one: one[0])]


def _sentence(kind: str, was: torch.dtype, now: torch.dtype) -> str:
    exact, old = now.itemsize > was.itemsize, _NAMES[was]
    how = f", exactly as they were in {old}" if exact else f": {old} was rounded to nearest once"
    return f"the values of {kind} are {_NAMES[now]}{how}"


def _with_both(manifest: Manifest, targets: Mapping[str, TensorParts]) -> list[str]:
    """Parameters that have both moments in the checkpoint; a first one alone, of Lion or Muon, is not rounded."""
    names = (name.partition("/")[2] for name in targets if kind_of(name) == STATES[0])
    return [name for name in names if f"{STATES[1]}/{name}" in manifest.tensors]


def _convert(
    path: Path, manifest: Manifest, names: list[str], formats: list[torch.dtype], targets: Mapping[str, TensorParts]
) -> None:
    """Convert a parameter's moments. Muon's matrices have a first one alone, which continues AdamW's."""
    held = [targets[one].parts for one in names if one in targets]
    for parts in zip(*held, strict=True):
        offsets, view = parts[0]
        boxes = dict.fromkeys(names, (tuple(offsets), tuple(view.shape)))
        kept = read_tensors(path, names, manifest, boxes)
        m, v = as_wide([kept[name] for name in names], torch.float32)
        draws = torch.full_like(m, _NEAREST | _NEAREST << 16, dtype=torch.int64).to(torch.int32)
        for (_, view), values in zip(parts, in_formats(m, v, formats, draws), strict=False):
            view.copy_(values)
