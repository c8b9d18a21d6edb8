"""What a stranger's checkpoint names as its tokenizer is used only with the recorded SHA-256."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptpar.config import TokenizerConfig
from gptpar.config.stored import StoredModel
from gptpar.errors import CheckpointError, TokenizerError
from gptpar.exchange.checkpoint_tokenizer import digests_of, tokenizer_of_checkpoint
from gptpar.exchange.kept import files_to_keep, kept_in
from gptpar.exchange.tokenizer_files import tokenizer_files
from tests.helpers import tiny_config
from tests.pairs import in_turns

SECRET = b"a private key"
MODEL = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"}


def stored(root: Path, named: str, sha256: Any) -> StoredModel:
    tokenizer = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=named)
    return StoredModel(tiny_config().model, tokenizer, root / "iter_0000001", {"tokenizer": {"sha256": sha256}})


def link(path: Path, target: Path) -> str:
    path.symlink_to(target)
    return str(path)


@in_turns(
    name=[
        lambda run, secret: str(secret),
        lambda run, secret: f"{run}/../private/id_rsa",
        lambda run, secret: os.path.relpath(secret),
        lambda run, secret: link(run / "tokenizer.json", secret),
        lambda run, secret: link(run / "huggingface" / "tokenizer.json", secret),
        lambda run, secret: link(run / "huggingface" / "folder", secret.parent) + "/id_rsa",
    ],
    recorded=[{}, None, "", {"tokenizer_model": "0" * 64}, {"tokenizer_model": None}],
)
def test_a_private_file_is_not_used(name: Callable[[Path, Path], str], recorded: Any, tmp_path: Path) -> None:
    run, secret = tmp_path / "run", tmp_path / "private" / "id_rsa"
    secret.parent.mkdir()
    secret.write_bytes(SECRET)
    (run / "huggingface").mkdir(parents=True)
    (run / "huggingface" / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"is not used: its SHA-256 is .* --tokenizer-model"):
        tokenizer_of_checkpoint(stored(run, name(run, secret), recorded), {})


def test_a_changed_file_is_told_and_used_where_a_flag_names_it(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    recorded = {"tokenizer_model": hashlib.sha256(b"{}").hexdigest()}
    checkpoint = stored(tmp_path / "run", str(path), recorded)
    assert digests_of(tokenizer_of_checkpoint(checkpoint, {})) == recorded
    path.write_text("{ }")
    with pytest.raises(TokenizerError, match=recorded["tokenizer_model"]):
        tokenizer_of_checkpoint(checkpoint, {})
    assert tokenizer_of_checkpoint(checkpoint, {"tokenizer_model": str(path)}) == checkpoint.tokenizer


def test_links_that_lead_out_of_a_folder_are_not_copied(tmp_path: Path) -> None:
    secret, run = tmp_path / "id_rsa", tmp_path / "a" / "b" / "run"
    secret.write_bytes(SECRET)
    folder = run / "huggingface"
    folder.mkdir(parents=True)
    pytest.importorskip("tokenizers")
    content = json.dumps({"version": "1.0", "added_tokens": [], "model": MODEL})
    (folder / "tokenizer.json").write_text(content)
    (folder / "config.json").write_text("{}")
    for name in ("chat_template.jinja", "model.safetensors.index.json"):
        link(folder / name, secret)
    checkpoint = stored(run, str(folder), {"tokenizer_model": hashlib.sha256(content.encode()).hexdigest()})
    written = tokenizer_files(tokenizer_of_checkpoint(checkpoint, {}), 16)
    assert written.keys() == {"tokenizer.json", "tokenizer_config.json"} and SECRET not in written.values()
    kept = kept_in(run)
    assert kept is not None and [path.name for path in kept.files()] == ["config.json", "tokenizer.json"]
    assert kept.index() == {}
    assert json.loads((folder / "config.json").read_text()) == {}
    with pytest.raises(CheckpointError, match=r"links to files outside of it: .*chat_template\.jinja"):
        files_to_keep(folder)
