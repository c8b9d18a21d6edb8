"""Hugging Face models become checkpoints and go back: the same bytes, the same logits, the same text."""

import itertools
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.exchange.hf_models import (
    TOKENS,
    contents,
    made_hf,
    made_run,
    our_logits,
    refusal,
    require_equal_logits,
    save_theirs,
)
from tests.unit.model.test_families import CASES

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

FAST = ("GPT-2", "gpt-oss")


def slow_but(*values: Any, fast: Collection[Any]) -> list[Any]:
    """Values of a parameter, all but the fast ones marked as slow."""
    return [one if one in fast else pytest.param(one, marks=pytest.mark.slow) for one in values]


@pytest.mark.parametrize("name", slow_but(*CASES, fast=FAST))
def test_in_and_out_again(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = save_theirs(tmp_path / "theirs", name)
    run = made_run(tmp_path)
    assert "made the checkpoint" in capsys.readouterr().out
    require_equal_logits(our_logits(run, TOKENS), reference, TOKENS)
    assert contents(made_hf(tmp_path)) == contents(tmp_path / "theirs")

    shutil.rmtree(run / "huggingface")  # as a run that began here, what is written anew is loaded unedited
    out = made_hf(tmp_path, "--max-shard-size", "9KB", name="out")
    assert (out / "model.safetensors.index.json").exists()
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    assert type(loaded) is type(reference)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(TOKENS).logits, reference(TOKENS).logits, rtol=0, atol=0)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, reference.state_dict()[key]), key


def test_shards_of_bf16_and_tokenizer_files_come_back_byte_for_byte(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    save_theirs(theirs, "Qwen3", dtype=torch.bfloat16, max_shard_size="8KB")
    (theirs / "tokenizer_config.json").write_text('{"eos_token":"<|im_end|>"}')
    (theirs / "README.md").write_text("a card\n")
    assert len(list(theirs.glob("*.safetensors"))) > 2
    made_run(tmp_path)
    assert contents(made_hf(tmp_path)) == contents(theirs)


@pytest.mark.parametrize("second", slow_but(False, True, fast=[False]), ids=["once", "twice"])
def test_weights_that_are_there_once_come_back_byte_for_byte(second: bool, tmp_path: Path) -> None:
    """Under the old names of GPT-2's own files; a second copy of the tied embedding and buffers do not come back."""
    theirs = tmp_path / "theirs"
    reference = save_theirs(theirs, "GPT-2")
    whole = safetensors.load_file(theirs / "model.safetensors")
    weights = {name.removeprefix("transformer."): value for name, value in whole.items()}
    more = {"lm_head.weight": weights["wte.weight"].clone(), "h.0.attn.bias": torch.ones(1, 1, 16, 16).tril()}
    safetensors.save_file(weights | (more if second else {}), theirs / "model.safetensors", {"format": "pt"})
    require_equal_logits(our_logits(made_run(tmp_path), TOKENS), reference, TOKENS)
    back = made_hf(tmp_path)
    if second:
        there = safetensors.load_file(back / "model.safetensors")
        assert there.keys() == whole.keys() and all(torch.equal(there[name], whole[name]) for name in whole)
    else:
        assert contents(back) == contents(theirs)


@pytest.mark.parametrize("form", slow_but("one file", "shards", "torch's old format", fast=["one file"]))
def test_pickled_weights_are_read_and_written_as_safetensors(form: str, tmp_path: Path) -> None:
    """With the tied head and a mask as older versions saved them."""
    theirs = tmp_path / "theirs"
    reference = save_theirs(theirs, "GPT-2")
    weights = safetensors.load_file(theirs / "model.safetensors")
    weights |= {"lm_head.weight": weights["transformer.wte.weight"]}
    weights |= {"transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)}
    (theirs / "model.safetensors").unlink()
    if form == "shards":
        places = dict(zip(weights, itertools.cycle(["pytorch_model-1.bin", "pytorch_model-2.bin"]), strict=False))
        for file in set(places.values()):
            torch.save({name: weights[name] for name in weights if places[name] == file}, theirs / file)
        (theirs / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    else:
        torch.save(weights, theirs / "pytorch_model.bin", _use_new_zipfile_serialization=form == "one file")
    require_equal_logits(our_logits(made_run(tmp_path), TOKENS), reference, TOKENS)
    assert not [path for path in made_hf(tmp_path).iterdir() if "bin" in path.name]


def test_pickled_weights_of_another_form_are_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    save_theirs(theirs, "GPT-2")
    (theirs / "model.safetensors").unlink()
    torch.save({"w": 1}, theirs / "pytorch_model.bin")
    assert "something else than whole tensors by name" in refusal(tmp_path)
    (theirs / "pytorch_model.bin").write_bytes((theirs / "pytorch_model.bin").read_bytes()[:-100])
    assert "is no file of torch.save, or damaged" in refusal(tmp_path)
    (theirs / "pytorch_model.bin").rename(theirs / "elsewhere.bin")
    index = theirs / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../elsewhere.bin"}}))
    assert "does not say which files of this folder" in refusal(tmp_path)
