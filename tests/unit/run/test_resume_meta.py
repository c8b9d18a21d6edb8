"""What a checkpoint's meta says of itself: edited by a stranger, or damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptpar.errors import CheckpointError
from gptpar.run import resume
from gptpar.run.generation import load_model
from gptpar.run.progress import Progress
from gptpar.run.resume import progress_to_resume
from tests.helpers import make_trainer, tiny_config
from tests.unit.run.saved_runs import inputs_of, saved

# What is done to the meta -> what is told.
EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "progress is missing or null": lambda m: m.clear(),
    "config is 3": lambda m: m.update(config=3),
    "config.model.num_layers is 10000000, where at most": lambda m: m["config"]["model"].update(num_layers=10**7),
    "config.model.normalization is 'New', where one of": lambda m: m["config"]["model"].update(normalization="New"),
    "config.model holds 'qk_norm' = True": lambda m: m["config"]["model"].update(qk_norm=True),
    "optimizer_steps is 'x', where a whole number": lambda m: m.update(optimizer_steps="x"),
    "loss_scale is missing": lambda m: m.pop("loss_scale"),
    "schedule.max_lr is nan, where a number": lambda m: m["schedule"].update(max_lr=float("nan")),
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
    if told == next(iter(EDITS)):
        finetuned = tiny_config(f"--load {tmp_path} --finetune")
        assert resume.load(make_trainer(finetuned), inputs_of(finetuned), lambda _: None) == Progress()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"hidden_size": 2**16}, "says hidden_size 65,536, but it holds"),
        ({"kv_channels": 4}, "in the model that its meta describes"),
        ({"padded_vocab_size": None}, "padded_vocab_size is missing"),
    ],
)
def test_generate_builds_no_model_but_the_checkpoint_s(tmp_path: Path, values: dict[str, Any], told: str) -> None:
    path = saved(tmp_path, change=lambda meta: meta["config"]["model"].update(values))
    with pytest.raises(CheckpointError) as refused:
        load_model(tmp_path, torch.device("cpu"), torch.float32)
    assert told in str(refused.value) and str(path) in str(refused.value)
