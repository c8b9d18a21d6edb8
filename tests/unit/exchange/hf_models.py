"""Small models of transformers' families on the disk, and what is asked of conversions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.cli.convert import main as convert
from gptpar.data.tokenizer.bpe import byte_alphabet
from gptpar.errors import CheckpointError
from gptpar.pipeline import Stage
from gptpar.run.generation import load_model
from tests.helpers import random_tokens
from tests.unit.model.test_families import CASES, VOCAB_SIZE, theirs

VOCAB = VOCAB_SIZE
BPE_MERGES = "#version: 0.2\nh e\nl l\n"


def save_theirs(folder: Path, fields: dict[str, Any] | str, **options: Any) -> Any:
    """A model as transformers saves it in fp32; returns it in fp64.

    Args:
        fields: of its ``config.json``, or the name of a case.
        **options: of ``save_pretrained``.
    """
    model = theirs(CASES[fields] if isinstance(fields, str) else fields).to(options.pop("dtype", torch.float32))
    model.save_pretrained(folder, **options)
    return model.double()


def write_bpe(folder: Path) -> str:
    """Flags of a tokenizer of GPT-2's form with 259 tokens: the bytes, two merges, and the end of documents."""
    tokens = [*byte_alphabet(), "he", "ll", "<|endoftext|>"]
    folder.mkdir()
    (folder / "v.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "m.bpe").write_text(BPE_MERGES)
    return f"--tokenizer-type GPT2BPETokenizer --vocab-file {folder}/v.json --merge-file {folder}/m.bpe"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(root: Path) -> str:
    """What convert says of the folder ``theirs``, which stays as it is; nothing is written, and nothing is run."""
    before = contents(root / "theirs")
    with pytest.raises(CheckpointError) as told:
        convert([str(root / "theirs"), str(root / "run")])
    assert contents(root / "theirs") == before and {one.name for one in root.iterdir()} == {"theirs"}
    return str(told.value)


def made_run(root: Path) -> Path:
    """What convert makes of the folder ``theirs``, which stays as it is."""
    before = contents(root / "theirs")
    assert convert([str(root / "theirs"), str(root / "run")]) == 0
    assert contents(root / "theirs") == before
    return root / "run"


def made_hf(root: Path, *flags: str, name: str = "back") -> Path:
    """What convert makes of the folder ``run``."""
    assert convert([str(root / "run"), str(root / name), *flags]) == 0
    return root / name


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
