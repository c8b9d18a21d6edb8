"""What a checkpoint's meta says of itself: edited by a stranger, damaged, or older than a field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.checkpoint import read_manifest, save_checkpoint
from gptpar.errors import CheckpointError
from gptpar.run import resume
from gptpar.run.generation import load_model
from gptpar.run.progress import Progress
from gptpar.run.resume import progress_to_resume
from tests.helpers import make_trainer, tiny_config
from tests.unit.run import saved_runs
from tests.unit.run.saved_runs import inputs_of, saved

# What is done to the meta -> what is told.
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "progress is missing or null": lambda m: m.clear(),
    "config is missing or null": lambda m: m.pop("config"),
    "config.model is missing or null": lambda m: m["config"].update(model=None),
    "config is 3": lambda m: m.update(config=3),
    "config.model is [1]": lambda m: m["config"].update(model=[1]),
    "config.model.hidden_size is '32', where a whole number": lambda m: m["config"]["model"].update(hidden_size="32"),
    "config.model.num_layers is -2, where at least 1": lambda m: m["config"]["model"].update(num_layers=-2),
    "config.model.num_layers is 10000000, where at most": lambda m: m["config"]["model"].update(num_layers=10**7),
    "config.model.norm_epsilon is 'x', where a number": lambda m: m["config"]["model"].update(norm_epsilon="x"),
    "config.model.normalization is 'New', where one of": lambda m: m["config"]["model"].update(normalization="New"),
    "config.model holds 'qk_norm' = True": lambda m: m["config"]["model"].update(qk_norm=True),
    "config.data.data_path is 7, where a list": lambda m: m["config"]["data"].update(data_path=7),
    "progress is [1]": lambda m: m.update(progress=[1]),
    "progress holds 'new', which this version does not know": lambda m: m["progress"].update(new=1),
    "progress.iteration is missing": lambda m: m["progress"].pop("iteration"),
    "progress.consumed_samples is -3, where at least 0": lambda m: m["progress"].update(consumed_samples=-3),
    "progress.iteration is True, where a whole number": lambda m: m["progress"].update(iteration=True),
    "progress.iteration is 1000": lambda m: m["progress"].update(iteration=10**40),
    "optimizer_steps is 'x', where a whole number": lambda m: m.update(optimizer_steps="x"),
    "optimizer_steps is -3, where at least 0": lambda m: m.update(optimizer_steps=-3),
    "loss_scale is missing": lambda m: m.pop("loss_scale"),
    "loss_scale.value is 'big', where a number": lambda m: m["loss_scale"].update(value="big"),
    "loss_scale.good_steps is -1, where at least 0": lambda m: m["loss_scale"].update(good_steps=-1),
    "loss_scale holds 'more'": lambda m: m["loss_scale"].update(more=1),
    "schedule is 'linear', where an object": lambda m: m.update(schedule="linear"),
    "schedule.max_lr is nan, where a number": lambda m: m["schedule"].update(max_lr=float("nan")),
    "schedule.total is missing": lambda m: m["schedule"].pop("total"),
    "schedule holds 'extra'": lambda m: m["schedule"].update(extra=1),
    "tokenizer is 'gpt2', where an object": lambda m: m.update(tokenizer="gpt2"),
    "corpora is [3], where lists of corpora": lambda m: m.update(corpora=[3]),
    "corpora is {'data_path': [{}]}": lambda m: m.update(corpora={"data_path": [{}]}),
}


@pytest.mark.parametrize("told", EDITS)
def test_a_meta_that_is_no_run_s_is_told_in_sentences(tmp_path: Path, told: str) -> None:
    path = saved(tmp_path, change=EDITS[told])
    config = tiny_config(f"--load {tmp_path}")
    with pytest.raises(CheckpointError) as refused:
        progress_to_resume(config, inputs_of(config))
    message = str(refused.value)
    assert f"the meta of {path}" in message and told in message and "--finetune" in message
    finetuned = tiny_config(f"--load {tmp_path} --finetune")
    assert resume.load(make_trainer(finetuned), inputs_of(finetuned), lambda _: None) == Progress()


def test_all_of_it_is_told_at_once(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"weights/x": torch.zeros(1)}, {})
    config = tiny_config(f"--load {tmp_path}")
    with pytest.raises(CheckpointError) as refused:
        progress_to_resume(config, inputs_of(config))
    for name in ("config", "progress", "optimizer_steps", "loss_scale", "schedule", "tokenizer"):
        assert f"{name} is missing or null" in str(refused.value)


@pytest.mark.parametrize("told", [told for told in EDITS if told.startswith("config")])
def test_generate_tells_it_too(tmp_path: Path, told: str) -> None:
    saved(tmp_path, change=EDITS[told])
    if "config.data" in told:
        load_model(tmp_path, torch.device("cpu"), torch.float32)
        return
    with pytest.raises(CheckpointError) as refused:
        load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"hidden_size": 2**16}, "says hidden_size 65,536, but it holds"),
        ({"num_layers": 10**4}, "says num_layers 10,000, but it holds"),
        ({"num_layers": None}, "the model's num_layers is not known"),
        ({"kv_channels": 4}, "in the model that its meta describes"),
        ({"padded_vocab_size": None}, "padded_vocab_size is missing"),
    ],
)
def test_generate_builds_no_model_but_the_checkpoint_s(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    path = saved(tmp_path, change=lambda meta: meta["config"]["model"].update(values))
    with pytest.raises(CheckpointError) as refused:
        load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert told in str(refused.value) and str(path) in str(refused.value)


def test_an_older_checkpoint_in_place_of_a_damaged_one_is_compared_too(tmp_path: Path) -> None:
    saved(tmp_path, change=lambda meta: meta["config"]["data"].update(seed=5))
    config = tiny_config(f"--load {tmp_path} --save {tmp_path}")
    newest = saved_runs.save(make_trainer(config), Progress(9, consumed_samples=18), inputs_of(config), keep=None)
    with open(newest / "rank00000.bin", "r+b") as file:
        file.write(b"damage")
    assert read_manifest(newest).iteration == progress_to_resume(config, inputs_of(config)).iteration == 9
    with pytest.raises(CheckpointError, match=r"iter_0000007 cannot be resumed .*\n.*--seed 5 there, 1234 here"):
        resume.load(make_trainer(config), inputs_of(config), lambda _: None)


def test_a_checkpoint_from_before_there_was_a_field_goes_on(tmp_path: Path) -> None:
    """The length that ``--train-minutes`` fits came later than the format."""
    saved(tmp_path, change=lambda meta: meta["progress"].pop("fitted_iters"))
    config = tiny_config(f"--load {tmp_path}")
    assert resume.progress_to_resume(config, inputs_of(config)).fitted_iters is None
