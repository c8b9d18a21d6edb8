"""``--use-checkpoint-args``: the model and the tokenizer come from the checkpoint, and conflicts are told."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from gptpar.config import ModelConfig
from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import CheckpointError, ConfigError
from gptpar.run.checkpoint_args import with_checkpoint_args
from gptpar.run.resume import progress_to_resume
from tests.helpers import tiny_config
from tests.unit.run.saved_runs import inputs_of, saved

MODEL = "--position-embedding-type rope --disable-bias-linear --num-query-groups 2 --hidden-dropout 0.2"
RUN = "--micro-batch-size 2 --train-iters 20 --lr 1e-2 --mock-data --eval-iters 0"


def filled(folder: Path, words: str = "") -> ParsedFlags:
    return with_checkpoint_args(parse_flags(f"{RUN} --load {folder} --use-checkpoint-args {words}".split()))


def test_the_model_and_the_tokenizer_are_the_checkpoints(tmp_path: Path) -> None:
    path = saved(tmp_path, MODEL)
    there = tiny_config(MODEL)
    here, derived = resolve(filled(tmp_path), 1)
    assert dataclasses.replace(here.model, padded_vocab_size=64) == there.model and here.tokenizer == there.tokenizer
    reasons = {one.name: one.reason for one in derived}
    assert reasons["hidden size"] == reasons["vocab size"] == "--use-checkpoint-args"
    assert not filled(tmp_path).problems
    path.rename(tmp_path / "iter_0000099")  # a renamed one says the same
    assert resolve(filled(tmp_path), 1)[0].model == here.model


def test_rotary_positions_may_be_stretched_for_a_new_run(tmp_path: Path) -> None:
    saved(tmp_path, MODEL)
    stretched = "--seq-length 32 --rope-scaling-type yarn --original-max-position-embeddings 16 --rotary-base 50000"
    found = resolve(filled(tmp_path, f"{stretched} --finetune"), 1)[0].model
    assert (found.rope_scaling_type, found.rotary_base, found.max_position_embeddings) == ("yarn", 50000, 32)
    told = filled(tmp_path, stretched).problems
    assert len(told) == 3 and all("drop --use-checkpoint-args" in one for one in told)


def test_conflicts_are_told_all_at_once(tmp_path: Path) -> None:
    saved(tmp_path, MODEL)
    with pytest.raises(ConfigError) as caught:
        resolve(filled(tmp_path, "--preset 124M --num-layers 3 --vocab-size 61"), 1)
    told = caught.value.problems
    assert told[0].startswith("--preset 124M and --use-checkpoint-args both say")
    place = f"but the checkpoint in {tmp_path} has"
    assert f"--num-layers 3, {place} 2: drop it, or drop --use-checkpoint-args." in told
    assert f"--vocab-size 61, {place} 60: drop it, or drop --use-checkpoint-args." in told
    told = filled(tmp_path, "--vocab-size 60 --tokenizer-model a.model --tokenizer-type NullTokenizer").problems
    assert told == [f"--tokenizer-type NullTokenizer, {place} none: drop it, or drop --use-checkpoint-args."]


def keeping(folder: Path, words: str) -> ModelConfig:
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60"
    line = f"{RUN} {sizes} --make-vocab-size-divisible-by 64 --load {folder} {words}"
    return resolve(with_checkpoint_args(parse_flags(line.split())), 1)[0].model


def test_older_runs_keep_padding_in_the_softmax(tmp_path: Path) -> None:
    def former(meta: dict[str, Any]) -> None:
        del meta["config"]["model"]["softmax_vocab_size"], meta["config"]["model"]["softmax_over_padding"]

    for name, change, rows in (("former", former, 64), ("today", lambda meta: None, 60)):
        saved(tmp_path / name, change=change)
        for words in ("", "--finetune", "--use-checkpoint-args"):
            assert keeping(tmp_path / name, words).softmax_vocab_size == rows, (name, words)
    config = tiny_config(f"--load {tmp_path / 'today'} --softmax-over-padding")
    with pytest.raises(CheckpointError, match="--softmax-over-padding: token ids in the softmax 60 there, 64 here"):
        progress_to_resume(config, inputs_of(config))


def test_without_a_fused_bias_gelu_is_exact_but_in_runs_that_began_with_tanh(tmp_path: Path) -> None:
    words = "--disable-bias-linear"
    for flags, activation in (
        ("", "gelu_tanh"),
        (words, "gelu"),
        ("--no-bias-gelu-fusion", "gelu"),
        (f"{words} --swiglu", "gelu_tanh"),
        (f"{words} --squared-relu", "squared_relu"),
        (f"{words} --mlp-activation gelu_tanh", "gelu_tanh"),
    ):
        assert tiny_config(flags).model.mlp_activation == activation, flags
    saved(tmp_path, f"{words} --mlp-activation gelu_tanh")
    for more in ("", "--use-checkpoint-args"):
        assert keeping(tmp_path, f"{words} {more}").mlp_activation == "gelu_tanh"
    saved(tmp_path / "new", words)
    assert keeping(tmp_path / "new", words).mlp_activation == "gelu"
