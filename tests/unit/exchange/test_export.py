"""Checkpoints of runs that began in gptpar go out: padding, tokenizer, family, and what no family has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptpar.cli.convert import main as convert
from gptpar.cli.pretrain import main as pretrain
from gptpar.config.flags import parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import CheckpointError, ConfigError
from gptpar.exchange.exports import Exports
from gptpar.model.families import config_of
from gptpar.run.generation import load_model
from tests.helpers import TINY, tiny_config
from tests.unit.exchange.hf_models import TOKENS, contents, logits_of, made_hf, made_run, save_theirs, write_bpe

transformers = pytest.importorskip("transformers")

RUN = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 --train-iters 1 "
RUN += "--lr 1e-2 --mock-data --eval-iters 0 "


@pytest.mark.slow
def test_a_run_with_gpt2s_tokenizer_loads_in_transformers(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    pretrain(f"{RUN} {write_bpe(tmp_path / 'bpe')} --save {run} --save-interval 1".split())
    made_hf(tmp_path, name="out")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    assert model.config.vocab_size == 259 and model.config.eos_token_id == 258  # of 384 rows
    stage, stored = load_model(run, torch.device("cpu"), torch.float64)
    assert stored.model.padded_vocab_size == 384
    with torch.no_grad():
        wanted = model(TOKENS).logits.flatten(0, 1)
    torch.testing.assert_close(logits_of(stage, TOKENS)[:, :259], wanted, rtol=1e-11, atol=1e-11)
    reader = transformers.AutoTokenizer.from_pretrained(out)
    o = json.loads((tmp_path / "bpe/v.json").read_text())["o"]
    assert reader("hello").input_ids == [256, 257, o] and reader.eos_token_id == 258
    assert reader.decode(reader("hello there").input_ids) == "hello there"
    before = contents(out)
    (tmp_path / "bpe/v.json").unlink()  # the checkpoint has its own
    assert contents(made_hf(tmp_path, name="again")) == before
    (run / "iter_0000001" / "tokenizer" / "vocab.json").unlink()
    with pytest.raises(CheckpointError, match="(?s)nothing is overwritten.*vocab.json cannot be read.*--vocab-file"):
        convert([str(run), str(out)])
    assert contents(out) == before
    bare = made_hf(tmp_path, "--no-tokenizer", "--dtype", "bf16", name="bare")
    names = {path.name for path in bare.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(bare, dtype="auto")  # as config.json says
    assert {value.dtype for value in loaded.state_dict().values()} == {torch.bfloat16}


LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
WINDOWS = "--window-size 4 --window-pattern SF"


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("", "gpt2"),
        ("--position-embedding-type rope --rotary-percent 0.25", "gpt_neox"),
        (LLAMA, "llama"),
        (LLAMA + "--add-qkv-bias " + WINDOWS, "qwen2"),
        (LLAMA + "--qk-layernorm " + WINDOWS, "qwen3"),
        (LLAMA + "--qk-layernorm --qk-layernorm-scope width --norm-placement post", "olmo2"),
        (LLAMA + "--no-rope-freq 2", "smollm3"),
        (LLAMA + "--num-experts 4 --qk-layernorm --qk-layernorm-scope width", "olmoe"),
        (LLAMA + "--num-experts 4 --moe-layer-freq 2 --moe-ffn-hidden-size 24 --qk-layernorm", "qwen3_moe"),
        (LLAMA + "--num-experts 4 --window-size 4 --moe-z-loss-coeff 1e-3", "mixtral"),
        (
            "--position-embedding-type rope --rotary-percent 0.5 --rope-scaling-type yarn --yarn-attention-factor 1.25 "
            "--original-max-position-embeddings 8 --no-yarn-correction-range-round-to-int --yarn-beta-fast 2",
            "gpt_neox",
        ),
    ],
)
def test_the_family_follows_from_the_model(flags: str, kind: str) -> None:
    assert config_of(tiny_config(flags).model, 60)["model_type"] == kind


@pytest.mark.parametrize(
    ("flags", "kind", "told"),
    [
        ("--logit-softcap 20", "gpt2", "--logit-softcap is 20.0, and there it is 0.0"),
        ("--norm-placement peri", "gpt2", "--norm-placement is peri, and there it is pre"),
        ("--position-embedding-type none", "gpt_neox", "--position-embedding-type is none"),
        ("--mlp-activation geglu", "gpt2", "--mlp-activation is geglu, and there it is gelu."),
        (LLAMA.replace("--swiglu", "--squared-relu"), "llama", "--swiglu is False, and there it is True"),
        (LLAMA + "--attention-output-gate", "llama", "--attention-output-gate is True"),
        (LLAMA + "--num-experts 4 --moe-layer-freq 2", "qwen3_moe", "--qk-layernorm is False, and there it is True"),
        *(
            (LLAMA + f"--num-experts 4 --{flag}", "mixtral", f"--{name} is {value}, and there it is ")
            for flag, name, value in (
                ("moe-router-score-function sigmoid", "moe-router-score-function", "sigmoid"),
                ("moe-router-topk-scaling-factor 2", "moe-router-topk-scaling-factor", "2.0"),
                ("moe-router-enable-expert-bias", "moe-router-enable-expert-bias", "True"),
                ("moe-shared-expert-intermediate-size 8", "moe-shared-expert-intermediate-size", "8"),
            )
        ),
    ],
)
def test_what_no_family_computes_is_told(flags: str, kind: str, told: str) -> None:
    config, _ = resolve(parse_flags(f"{TINY} {flags}".split()), 1)
    with pytest.raises(ConfigError, match=f"(?s)the nearest family is {kind}.*{told}"):
        config_of(config.model, 60)


def test_kept_headers_name_files_of_the_new_folder_only(tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", "Llama")
    made_run(tmp_path)
    headers = tmp_path / "run/huggingface/safetensors_headers.json"
    (text,) = json.loads(headers.read_text()).values()
    headers.write_text(json.dumps({"../../escaped.safetensors": text}))
    with pytest.raises(CheckpointError, match="is damaged"):
        convert([str(tmp_path / "run"), str(tmp_path / "back")])
    assert not list(tmp_path.rglob("escaped*"))


@pytest.mark.slow
def test_an_export_that_fails_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    save_theirs(tmp_path / "theirs", "Llama")
    made_run(tmp_path)
    said: list[str] = []
    exports = Exports(2, said.append)
    for iteration in (0, 1, 2):  # the second is none of those, the third finds the first one's folder
        exports.begin(tmp_path / "run/iter_0000000", iteration)
    exports.finish()
    assert len(said) == 2 and "exported iter_0000000" in said[0]
    assert said[1].startswith("WARNING: no Hugging Face folder was made") and "nothing is overwritten" in said[1]
    assert contents(tmp_path / "run/hf/iter_0000000") == contents(tmp_path / "theirs")


@pytest.mark.slow
def test_neither_transformers_nor_safetensors_is_needed(tmp_path: Path) -> None:
    """In a process that has imported nothing of them yet."""
    save_theirs(tmp_path / "theirs", "Llama")
    program = (
        "import sys; sys.modules.update(transformers=None, safetensors=None); from gptpar.cli.convert import main; "
        "sys.exit(main(['theirs', 'run']) or main(['run', 'back']))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=120)
    assert contents(tmp_path / "back") == contents(tmp_path / "theirs")
