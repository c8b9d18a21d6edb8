"""The tokenizer of a checkpoint: its own copy moves with the run folder, and a stranger's name alone is not trusted."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint import find_checkpoints, load_checkpoint, save_checkpoint
from gptpar.checkpoint.manifest import read_manifest
from gptpar.checkpoint.proofs import recall, remember
from gptpar.checkpoint.tokenizer_copy import FOLDER, KEY
from gptpar.checkpoint.verify import verify_checkpoint
from gptpar.cli import main
from gptpar.config import TokenizerConfig
from gptpar.config.flags import parse_flags
from gptpar.config.stored import StoredModel, stored_model
from gptpar.errors import CheckpointError, TokenizerError
from gptpar.exchange.checkpoint_tokenizer import digests_of, tokenizer_of_checkpoint
from gptpar.exchange.kept import files_to_keep, kept_in
from gptpar.exchange.tokenizer_files import tokenizer_files
from gptpar.run.checkpoint_args import with_checkpoint_args
from tests.helpers import tiny_config
from tests.pairs import in_turns
from tests.unit.exchange.hf_models import BPE_MERGES, contents, write_bpe
from tests.unit.run.saved_runs import saved

RUN = "--micro-batch-size 2 --lr 1e-2 --mock-data --eval-iters 0"
SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
SECRET = b"a private key"
FILES = {"vocab.json": b"{}", "merges.txt": b"a b\n"}
WORD_LEVEL = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def link(path: Path, target: Path) -> str:
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_moved_run_folder_needs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    flags = write_bpe(Path("tokenizer"))
    saves = "--save run --save-interval 2 --save-local disk --save-local-interval 1"
    printed(capsys, *f"pretrain {SIZES} {RUN} {flags} --train-iters 4 {saves}".split())
    for _, path in find_checkpoints("run") + find_checkpoints("disk"):
        assert {file.name for file in (path / FOLDER).iterdir()} == {"vocab.json", "merges.txt"}
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "hello hell"}) + "\n")

    def found(load: str, out: Path) -> tuple[str, Any, dict[str, bytes]]:
        text = printed(capsys, *f"generate --load {load} --prompt hello --num-tokens 8".split())
        scores = json.loads(printed(capsys, *f"evaluate --load {load} --eval-tasks {tmp_path / 'texts.jsonl'}".split()))
        (score,) = scores["tasks"].values()
        printed(capsys, "convert", load, str(out))
        return text, {name: score[name] for name in score.keys() - {"seconds"}}, contents(out)

    before = found("run", tmp_path / "out1")
    (tmp_path / "there" / "run").rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "there" / "tokenizer")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert found("../moved", tmp_path / "out2") == before
    assert {"vocab.json", "merges.txt", "tokenizer.json"} <= before[2].keys()
    for length, words in ((5, SIZES), (6, "--use-checkpoint-args")):
        go_on = f"pretrain {RUN} {words} --train-iters {length} --load ../moved --save ../moved"
        said = printed(capsys, *go_on.split(), "--override-opt-param-scheduler")
        assert f"(iteration {length - 1})" in said and "GPT2BPETokenizer" in said
    # A run that goes back moves the later checkpoints into a branch, with their copies.
    back = f"pretrain {RUN} {SIZES} --train-iters 5 --load ../moved --save ../moved --ckpt-step 4"
    printed(capsys, *back.split(), "--override-opt-param-scheduler")
    (branch,) = (tmp_path / "moved" / "branches").iterdir()
    assert [number for number, _ in find_checkpoints(branch)] == [6, 5]
    for _, path in find_checkpoints(branch):
        assert verify_checkpoint(path) == [] and read_manifest(path).meta[KEY].keys() == FILES.keys()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda copy: shutil.rmtree(copy), ["vocab.json cannot be read: No such file", "merges.txt cannot be read"]),
        (lambda copy: (copy / "merges.txt").write_bytes(b"b a\n"), ["merges.txt has the SHA-256 .* was saved"]),
        (lambda copy: link(copy / "vocab.json", copy / "merges.txt"), ["vocab.json is a link"]),
        (lambda copy: link(copy / "vocab.json", copy / "vocab.json"), ["vocab.json cannot be read: Too many levels"]),
        (lambda copy: (copy / "tokenizer_config.json").touch(), ["tokenizer_config.json was not saved with it"]),
    ],
)
def test_a_damaged_copy_is_told_and_costs_no_tensor(
    change: Callable[[Path], object], told: list[str], tmp_path: Path
) -> None:
    path = save_checkpoint(tmp_path, 1, {"w": torch.ones(3)}, {}, tokenizer_files=FILES)
    assert verify_checkpoint(path) == []
    remember(path, [])
    assert recall(path) is not None
    change(path / FOLDER)
    assert recall(path) is None  # what was verified is not what is there now
    problems = verify_checkpoint(path)
    assert len(problems) == len(told) and all(map(re.search, told, problems)), problems
    target = torch.zeros(3)
    load_checkpoint(tmp_path, {"w": target})
    assert target.tolist() == [1, 1, 1]


def of_stranger(root: Path, tokenizer: dict[str, str], recorded: dict[str, str], copied: Any = None) -> Path:
    """A checkpoint whose manifest names a tokenizer's files."""

    def change(meta: dict[str, Any]) -> None:
        meta["config"]["tokenizer"] |= tokenizer
        meta["tokenizer"] = {"type": tokenizer["tokenizer_type"], "vocab_size": 60, "eod": 0, "sha256": recorded}
        meta |= {} if copied is None else {KEY: copied}

    return saved(root, change=change)


@pytest.mark.parametrize(
    ("copied", "told"),
    [
        (None, "id_rsa is not used: its SHA-256 is .* recorded no SHA-256; name the right file with --vocab-file"),
        ({"../../private/id_rsa": digest(SECRET)}, "no plain file names"),
        ({"..": digest(SECRET)}, "no plain file names"),
        ([digest(SECRET)], "no plain file names"),
        ({"linked.json": digest(SECRET)}, "linked.json is a link, and none is followed.*--vocab-file and --merge-file"),
        ({"vocab.json": 7}, "vocab.json is a link"),
        ({}, "id_rsa is not used"),
    ],
)
def test_a_strangers_checkpoint_brings_no_private_file_into_an_export(
    copied: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_bytes(SECRET)
    names = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(secret), "merge_file": str(secret)}
    path = of_stranger(tmp_path / "run", names, {}, copied)
    (path / FOLDER).mkdir()
    for name in ("linked.json", "vocab.json"):
        if isinstance(copied, dict) and name in copied:
            link(path / FOLDER / name, secret)
    assert main(["convert", str(path.parent), str(tmp_path / "out")]) == 1
    assert re.search(told, capsys.readouterr().err, re.DOTALL) and not (tmp_path / "out").exists()
    if copied == {}:
        printed(capsys, "convert", str(path.parent), str(tmp_path / "out"), *write_bpe(tmp_path / "good").split())
        found = contents(tmp_path / "out")
        assert found["merges.txt"] == BPE_MERGES.encode()
        assert not [name for name, content in found.items() if SECRET in content]


def stored(root: Path, named: str, sha256: Any) -> StoredModel:
    tokenizer = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=named)
    return StoredModel(tiny_config().model, tokenizer, root / "iter_0000001", {"tokenizer": {"sha256": sha256}})


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


def test_an_outside_file_is_used_as_recorded_and_exported_with_others_only_where_a_flag_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint of a former version has the SHA-256 of tokenizer.json alone."""
    public = tmp_path / "public"
    public.mkdir()
    (public / "tokenizer.json").write_text("{}")
    (public / "chat_template.jinja").write_bytes(SECRET)
    given, recorded = {"tokenizer_model": str(public)}, {"tokenizer_model": digest(b"{}")}
    path = of_stranger(tmp_path / "run", {"tokenizer_type": "HFTokenizer", **given}, recorded)
    assert main(["convert", str(path.parent), str(tmp_path / "out")]) == 1
    assert re.search("tokenizer.json is not exported: .* with --tokenizer-model", capsys.readouterr().err)
    its = stored_model(path, read_manifest(path).meta)
    assert digests_of(its.tokenizer) == recorded
    assert tokenizer_of_checkpoint(its, {}) == its.tokenizer
    assert tokenizer_of_checkpoint(its, given, for_export=True) == its.tokenizer
    (public / "chat_template.jinja").unlink()
    assert tokenizer_of_checkpoint(its, {}, for_export=True) == its.tokenizer
    (public / "tokenizer.json").write_text("{ }")
    with pytest.raises(TokenizerError, match=recorded["tokenizer_model"]):
        tokenizer_of_checkpoint(its, {})
    assert tokenizer_of_checkpoint(its, given) == its.tokenizer


def test_links_that_lead_out_of_a_folder_are_not_copied(tmp_path: Path) -> None:
    secret, run = tmp_path / "id_rsa", tmp_path / "a" / "b" / "run"
    secret.write_bytes(SECRET)
    folder = run / "huggingface"
    folder.mkdir(parents=True)
    content = json.dumps({"version": "1.0", "added_tokens": [], "model": WORD_LEVEL})
    (folder / "tokenizer.json").write_text(content)
    (folder / "config.json").write_text("{}")
    for name in ("chat_template.jinja", "model.safetensors.index.json"):
        link(folder / name, secret)
    its = stored(run, str(folder), {"tokenizer_model": digest(content.encode())})
    written = tokenizer_files(tokenizer_of_checkpoint(its, {}), 16)
    assert written.keys() == {"tokenizer.json", "tokenizer_config.json"} and SECRET not in written.values()
    kept = kept_in(run)
    assert kept is not None and [path.name for path in kept.files()] == ["config.json", "tokenizer.json"]
    assert kept.index() == {}
    with pytest.raises(CheckpointError, match=r"links to files outside of it: .*chat_template\.jinja"):
        files_to_keep(folder)


def test_a_resumed_run_without_flags_of_a_tokenizer_takes_the_copy(tmp_path: Path) -> None:
    names = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "v", "merge_file": "m"}
    path = of_stranger(tmp_path, names, {}, {name: digest(content) for name, content in FILES.items()})
    words = f"{RUN} {SIZES} --load {tmp_path}".split()
    (problem,) = with_checkpoint_args(parse_flags(words)).problems
    assert "vocab.json cannot be read" in problem and "name the right files with --vocab-file" in problem
    (path / FOLDER).mkdir()
    for name, content in FILES.items():
        (path / FOLDER / name).write_bytes(content)
    for more in ([], ["--use-checkpoint-args"]):
        found = with_checkpoint_args(parse_flags([*words, *more])).flags.tokenizer
        assert (found.tokenizer_type, found.vocab_file) == ("GPT2BPETokenizer", str(path / FOLDER / "vocab.json"))
    typed = with_checkpoint_args(parse_flags([*words, "--vocab-size", "60"])).flags.tokenizer
    assert typed == TokenizerConfig(vocab_size=60)


def test_a_moved_import_of_a_hugging_face_folder_has_its_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "first")
    theirs = tmp_path / "theirs"
    printed(capsys, "convert", str(tmp_path / "first"), str(theirs))
    (theirs / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (theirs / "merges.txt").write_text("a b\n")
    before = contents(theirs)
    printed(capsys, "convert", str(theirs), str(tmp_path / "run"))
    theirs.rename(tmp_path / "gone")
    (tmp_path / "run").rename(tmp_path / "moved")
    path = tmp_path / "moved" / "iter_0000000"
    its = stored_model(path, read_manifest(path).meta)
    assert digests_of(tokenizer_of_checkpoint(its, {}, for_export=True)) == its.meta["tokenizer"]["sha256"]
    assert verify_checkpoint(path) == [] and contents(path / FOLDER) == {name: before[name] for name in FILES}
    printed(capsys, "convert", str(tmp_path / "moved"), str(tmp_path / "back"))
    assert contents(tmp_path / "back") == before
