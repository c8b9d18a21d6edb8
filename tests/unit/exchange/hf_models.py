"""Small models of transformers' families on the disk, and what is compared of them."""

from pathlib import Path
from typing import Any

import torch

from gptpar.pipeline import Stage
from gptpar.run.generation import load_model
from tests.helpers import random_tokens
from tests.unit.model.test_families import CASES, VOCAB_SIZE, theirs

VOCAB = VOCAB_SIZE


def save_theirs(folder: Path, fields: dict[str, Any] | str, **options: Any) -> Any:
    """A model as transformers saves it in fp32; returns it in fp64.

    Args:
        fields: of its ``config.json``, or the name of a case.
        **options: of ``save_pretrained``.
    """
    model = theirs(CASES[fields] if isinstance(fields, str) else fields).to(options.pop("dtype", torch.float32))
    model.save_pretrained(folder, **options)
    return model.double()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def our_logits(run: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Of a run folder's checkpoint, in fp64."""
    stage, _ = load_model(run, torch.device("cpu"), torch.float64)
    return logits_of(stage, tokens)


def logits_of(stage: Stage, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return stage(tokens, {"seq_length": tokens.shape[1]})


def require_equal_logits(ours: torch.Tensor, reference: Any, tokens: torch.Tensor) -> None:
    """fp64: but for the angles of rotary positions, which transformers forms in fp32."""
    with torch.no_grad():
        wanted = reference(tokens).logits.flatten(0, 1)
    assert wanted.abs().mean() > 0.1
    exact = reference.config.model_type == "gpt2"
    torch.testing.assert_close(ours[:, :VOCAB], wanted, rtol=1e-11 if exact else 1e-5, atol=1e-11 if exact else 1e-5)


TOKENS = random_tokens(3, 15, VOCAB)
