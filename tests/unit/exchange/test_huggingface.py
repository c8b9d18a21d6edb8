"""Hugging Face models become checkpoints and go back: the same bytes, the same logits, the same text."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from gptpar.cli.convert import main as convert
from gptpar.errors import CheckpointError
from tests.unit.exchange.hf_models import TOKENS, contents, our_logits, require_equal_logits, save_theirs
from tests.unit.exchange.megatron_models import Harm
from tests.unit.model.test_families import CASES

transformers = pytest.importorskip("transformers")

FAST = ("GPT-2", "gpt-oss")
CASES_BY_SPEED = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", CASES_BY_SPEED)
def test_in_and_out_again(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, run, back, out = (tmp_path / folder for folder in ("theirs", "run", "back", "out"))
    reference = save_theirs(theirs, name)
    before = contents(theirs)

    assert convert([str(theirs), str(run)]) == 0
    assert "made the checkpoint" in capsys.readouterr().out
    require_equal_logits(our_logits(run, TOKENS), reference, TOKENS)

    assert convert([str(run), str(back)]) == 0
    assert contents(back) == before
    assert contents(theirs) == before

    shutil.rmtree(run / "huggingface")  # as a run that began here, what is written anew is loaded unedited
    convert([str(run), str(out), "--max-shard-size", "9KB"])
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
    theirs, run, back = tmp_path / "theirs", tmp_path / "run", tmp_path / "back"
    save_theirs(theirs, "Qwen3", dtype=torch.bfloat16, max_shard_size="8KB")
    (theirs / "tokenizer_config.json").write_text('{"eos_token":"<|im_end|>"}')
    (theirs / "README.md").write_text("a card\n")
    assert len(list(theirs.glob("*.safetensors"))) > 2
    convert([str(theirs), str(run)])
    convert([str(run), str(back)])
    assert contents(back) == contents(theirs)


@pytest.mark.parametrize("second", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["once", "twice"])
def test_weights_that_are_there_once_come_back_byte_for_byte(second: bool, tmp_path: Path) -> None:
    """Under the old names of GPT-2's own files; a second copy of the tied embedding and buffers do not come back."""
    from safetensors.torch import load_file, save_file

    theirs, run, back = tmp_path / "theirs", tmp_path / "run", tmp_path / "back"
    reference = save_theirs(theirs, "GPT-2")
    whole = load_file(theirs / "model.safetensors")
    weights = {name.removeprefix("transformer."): value for name, value in whole.items()}
    more = {"lm_head.weight": weights["wte.weight"].clone(), "h.0.attn.bias": torch.ones(1, 1, 16, 16).tril()}
    save_file(weights | (more if second else {}), theirs / "model.safetensors", {"format": "pt"})
    convert([str(theirs), str(run)])
    require_equal_logits(our_logits(run, TOKENS), reference, TOKENS)
    convert([str(run), str(back)])
    if second:
        there = load_file(back / "model.safetensors")
        assert {name: value.tolist() for name, value in there.items()} == {
            name: value.tolist() for name, value in whole.items()
        }
    else:
        assert contents(back) == contents(theirs)


@pytest.mark.slow
def test_another_dtype_is_said_in_the_config(tmp_path: Path) -> None:
    theirs, run, out = tmp_path / "theirs", tmp_path / "run", tmp_path / "out"
    save_theirs(theirs, "Llama")
    convert([str(theirs), str(run)])
    convert([str(run), str(out), "--dtype", "bf16"])
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert {value.dtype for value in loaded.state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "form",
    [
        "one file",
        pytest.param("shards", marks=pytest.mark.slow),
        pytest.param("torch's old format", marks=pytest.mark.slow),
    ],
)
def test_pickled_weights_are_read_and_written_as_safetensors(form: str, tmp_path: Path) -> None:
    theirs, run, back = tmp_path / "theirs", tmp_path / "run", tmp_path / "back"
    reference = save_theirs(theirs, "GPT-2")
    save_as_bin(theirs, shards=2 if form == "shards" else 1, zipped=form != "torch's old format")
    before = contents(theirs)
    assert convert([str(theirs), str(run)]) == 0
    require_equal_logits(our_logits(run, TOKENS), reference, TOKENS)
    assert contents(theirs) == before
    convert([str(run), str(back)])
    assert not [path for path in back.iterdir() if "bin" in path.name]


def save_as_bin(folder: Path, *, shards: int = 1, zipped: bool = True) -> None:
    """In the place of a folder's safetensors file, with the tied head and a mask as older versions saved them."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    weights |= {
        "lm_head.weight": weights["transformer.wte.weight"],
        "transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16),
    }
    (folder / "model.safetensors").unlink()
    places = {}
    for number in range(shards):
        name = "pytorch_model.bin" if shards == 1 else f"pytorch_model-{number + 1:05d}-of-{shards:05d}.bin"
        part = dict(list(weights.items())[number::shards])
        places |= dict.fromkeys(part, name)
        torch.save(part, folder / name, _use_new_zipfile_serialization=zipped)
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_that_would_run_a_command_are_refused(zipped: bool, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    save_theirs(theirs, "GPT-2")
    (theirs / "model.safetensors").unlink()
    harm = {"w": torch.ones(2), "x": Harm(f"touch {tmp_path / 'harmed'}")}
    torch.save(harm, theirs / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match=r"bin is refused: reading it would call \w+.system, which may"):
        convert([str(theirs), str(tmp_path / "run")])
    torch.save({"w": 1}, theirs / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="something else than whole tensors by name"):
        convert([str(theirs), str(tmp_path / "run")])
    (theirs / "pytorch_model.bin").write_bytes((theirs / "pytorch_model.bin").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="is no file of torch.save, or damaged"):
        convert([str(theirs), str(tmp_path / "run")])
    (theirs / "pytorch_model.bin").rename(theirs / "elsewhere.bin")
    index = theirs / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "../elsewhere.bin"}}))
    with pytest.raises(CheckpointError, match="does not say which files of this folder"):
        convert([str(theirs), str(tmp_path / "run")])
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}
