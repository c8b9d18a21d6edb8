"""``--use-checkpoint-args``: the model and the tokenizer come from the checkpoint, and conflicts are told."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gptpar.cli import main
from gptpar.cli.benchmark import measure
from gptpar.cli.plan import make_planner
from gptpar.config.flags import ParsedFlags, parse_flags
from gptpar.config.validate import resolve
from gptpar.errors import CheckpointError, ConfigError
from gptpar.training.checkpoint_args import with_checkpoint_args
from tests.helpers import tiny_config
from tests.unit.training.saved_runs import saved

MODEL = "--position-embedding-type rope --disable-bias-linear --num-query-groups 2 --hidden-dropout 0.2"
RUN = "--micro-batch-size 2 --train-iters 20 --lr 1e-2 --mock-data --eval-iters 0"


def filled(folder: Path, words: str = "") -> ParsedFlags:
    return with_checkpoint_args(parse_flags(f"{RUN} --load {folder} --use-checkpoint-args {words}".split()))


def test_the_model_and_the_tokenizer_are_the_checkpoints(tmp_path: Path) -> None:
    saved(tmp_path, MODEL)
    there = tiny_config(MODEL)
    here, derived = resolve(filled(tmp_path), 1)
    assert dataclasses.replace(here.model, padded_vocab_size=64) == there.model and here.tokenizer == there.tokenizer
    reasons = {one.name: one.reason for one in derived}
    assert reasons["hidden size"] == reasons["vocab size"] == "--use-checkpoint-args"
    assert not filled(tmp_path).problems


def test_what_agrees_and_what_may_differ_is_taken_as_typed(tmp_path: Path) -> None:
    saved(tmp_path, MODEL)
    found = filled(tmp_path, "--hidden-size 32 --hidden-dropout 0.1 --seq-length 8")
    assert not found.problems
    assert (found.flags.model.hidden_dropout, found.flags.model.seq_length) == (0.1, 8)


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


def test_without_a_checkpoint_it_is_told(tmp_path: Path) -> None:
    assert "there is no checkpoint in --load" in filled(tmp_path).problems[0]
    with pytest.raises(ConfigError) as caught:  # nor is the model asked for
        resolve(with_checkpoint_args(parse_flags([*RUN.split(), "--use-checkpoint-args", "--load", str(tmp_path)])), 1)
    assert caught.value.problems == [
        f"--use-checkpoint-args: there is no checkpoint in --load {tmp_path} yet: drop it at the start."
    ]
    (problem,) = with_checkpoint_args(parse_flags([*RUN.split(), "--use-checkpoint-args"])).problems
    assert problem == "--use-checkpoint-args needs --load, a folder with checkpoints."
    with pytest.raises(CheckpointError):
        filled(tmp_path, "--ckpt-step 9")


def test_plan_and_benchmark_take_the_model_and_leave_the_run_alone(tmp_path: Path) -> None:
    saved(tmp_path, MODEL)
    words = f"--load {tmp_path} --use-checkpoint-args --micro-batch-size 2".split()
    config, _ = resolve(measure.parse(words), 1)
    planner, _ = make_planner(words)
    there = tiny_config(MODEL).model
    for model in (config.model, planner.plan().job.config.model):
        assert dataclasses.replace(model, padded_vocab_size=64) == there
    assert config.checkpoint.load is None and config.data.mock_data


def test_a_benchmark_counts_the_parameters_of_a_model_with_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    """The vocabulary is known only once the run has read the tokenizer."""
    words = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1"
    flags = f"{words} --tokenizer-type ByteLevelTokenizer --steps 1 --warmup-steps 1"
    assert main(["benchmark", *flags.split()]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    block = 12 * 32 * 32 + 13 * 32
    padded = 384  # 256 bytes and the end of a document, up to a multiple of 128
    assert found["params"] == 2 * block + (padded + 16) * 32 + 2 * 32


def test_without_the_flag_nothing_is_read() -> None:
    parsed = parse_flags(["--load", "/nowhere"])
    assert with_checkpoint_args(parsed) is parsed
